// Interpolation at the function level. Along a sharded dim the local operator
// is called on the rows that the owned outputs read, where shifting changes
// nothing (see Note [Shift-invariant interpolation]); elsewhere rows are
// weighted one tap at a time. Both give PyTorch's numbers.
#include <ATen/native/UpSample.h>
#include <ATen/ops/add.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/rules/stencil/plan_tensors.h"
#include "shardtensor/rules/stencil/run_stencil.h"
#include "shardtensor/rules/stencil/upsample_overlap.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Mode = Resample::Mode;

bool is_nearest(const Upsample& u) {
  return u.mode == Mode::Nearest || u.mode == Mode::NearestExact;
}

/// For one dim, this rank's outputs as sums of weighted input rows: output i is
/// the sum over j of weights[j][i] * rows[j][i], local rows.
struct WeightedRows {
  std::vector<std::vector<int64_t>> rows;
  std::vector<std::vector<double>> weights;
};

struct UpsamplePlan {
  StencilCall call;
  std::vector<int64_t> size; // of the local operator
  std::vector<Scale> scales;
  bool calls_plain = false; // or every dim is weighted or unchanged
  std::vector<std::optional<WeightedRows>> weighted; // per dim
  std::shared_ptr<const UpsampleApart> apart; // if that is possible
};

WeightedRows weigh(
    const Stencil& stencil,
    const StencilPiece& piece,
    const Interval& outputs) {
  WeightedRows result;
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    const Taps taps = stencil.taps(o);
    result.rows.resize(taps.count);
    result.weights.resize(taps.count);
    for (int64_t j = 0; j < taps.count; ++j) {
      result.rows[j].push_back(taps.rows[j] - piece.rows.begin);
      result.weights[j].push_back(taps.weights[j]);
    }
  }
  if (outputs.empty()) { // one tap for no output
    result.rows.resize(1);
    result.weights.resize(1);
  }
  return result;
}

Resample resample_of(const Upsample& u, size_t i, const Tensor& x) {
  Resample how{u.mode, u.align_corners, u.scales[i], false};
  const int64_t input = x.size(static_cast<int64_t>(i) + 2);
  const bool nearest = is_nearest(u);
  how.double_precision =
      x.scalar_type() == at::kDouble && (!nearest || x.is_cpu());
  // Off the CPU nearest recognizes copying and doubling by the extents.
  if (u.mode == Mode::Nearest && !x.is_cpu() &&
      (u.size[i] == input || u.size[i] == 2 * input)) {
    how.scale = std::nullopt;
  }
  return how;
}

UpsamplePlan plan_upsample(const Upsample& u, const Tensor& x) {
  const auto sizes = infer_sizes(
      u.op, x, u.dims(), [&](const Tensor& t) { return plain_upsample(u, t); });
  std::vector<Stencil> stencils;
  for (size_t i = 0; i < u.size.size(); ++i) {
    stencils.push_back(
        Stencil::resample(
            resample_of(u, i, x),
            x.size(static_cast<int64_t>(i) + 2),
            u.size[i]));
  }
  std::vector<int64_t> whole;
  if (!is_nearest(u) && !x.is_floating_point()) {
    // Images of integers have their own fixed-point arithmetic.
    for (int64_t dim = 2; dim < x.dim(); ++dim) {
      whole.push_back(dim);
    }
  }
  UpsamplePlan plan{
      plan_stencil_call(
          spec(x),
          whole,
          stencils,
          std::vector<int64_t>(u.size.size(), 0),
          sizes),
      u.size,
      u.scales,
      false,
      std::vector<std::optional<WeightedRows>>(u.size.size()),
      nullptr};
  for (size_t i = 0; i < stencils.size(); ++i) {
    if (!plan.call.is_cut[i]) {
      plan.calls_plain = true;
      continue;
    }
    const auto& piece = plan.call.pieces[i];
    if (stencils[i].is_shift_invariant()) {
      plan.calls_plain = true;
      plan.size[i] = stencils[i].local_outputs(piece);
      plan.scales[i] = stencils[i].local_scale();
      continue;
    }
    plan.size[i] = piece.rows.extent(); // passed on as it is, weighted later
    plan.scales[i] = std::nullopt;
    const auto dim = plan.call.first_dim() + static_cast<int64_t>(i);
    plan.weighted[i] =
        weigh(stencils[i], piece, plan.call.output->interval(dim));
  }
  if (!is_nearest(u)) {
    plan.apart = plan_upsample_apart(
        plan.call,
        stencils,
        {u.op, u.mode, plan.size, u.align_corners, plan.scales});
  }
  return plan;
}

std::shared_ptr<const UpsamplePlan> find_plan(
    const Upsample& u,
    const Tensor& x) {
  static PlanCache<UpsamplePlan> plans;
  PlanKey key;
  key.add(spec(x))
      .add(static_cast<int64_t>(u.mode))
      .add(static_cast<int64_t>(u.align_corners))
      .add(static_cast<int64_t>(x.scalar_type()))
      .add(static_cast<int64_t>(x.device().type()))
      .add(u.size);
  for (const auto& scale : u.scales) {
    key.add(scale.value_or(0.0));
  }
  return plans.find(key, [&] { return plan_upsample(u, x); });
}

Tensor weighted_sum(
    const Tensor& x,
    int64_t dim,
    const WeightedRows& weighted,
    bool single) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[dim] = static_cast<int64_t>(weighted.rows[0].size());
  Tensor sum;
  for (size_t j = 0; j < weighted.rows.size(); ++j) {
    const Tensor rows = x.index_select(dim, index_tensor(weighted.rows[j], x));
    if (single) {
      return rows;
    }
    const Tensor weights = weight_tensor(weighted.weights[j], x).view(shape);
    const Tensor term = at::mul(rows, weights);
    sum = sum.defined() ? at::add(sum, term) : term;
  }
  return sum;
}

bool is_reduced_float(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16;
}

/// Everything after the exchange, up to rows that nobody keeps.
Tensor local_upsample(
    const Upsample& u,
    const UpsamplePlan& plan,
    const Tensor& rows) {
  const bool nearest = is_nearest(u);
  Tensor y = rows;
  if (plan.calls_plain) {
    y = plain_upsample(
        {u.op, u.mode, plan.size, u.align_corners, plan.scales}, y);
  }
  // Weights are applied in float as PyTorch does, rounding at the end.
  const bool widen = !nearest && is_reduced_float(rows.scalar_type());
  for (size_t i = 0; i < plan.weighted.size(); ++i) {
    if (plan.weighted[i]) {
      y = weighted_sum(
          widen ? y.to(at::kFloat) : y,
          plan.call.first_dim() + static_cast<int64_t>(i),
          *plan.weighted[i],
          nearest);
    }
  }
  return y.to(rows.scalar_type());
}

/// A compiler has its own way with the local operator; its parts are fused.
bool computes_apart(const UpsamplePlan& plan, const Tensor& x) {
  const auto& local = impl_of(x)->local();
  const bool wide =
      local.scalar_type() == at::kFloat || local.scalar_type() == at::kDouble;
  return plan.apart && wide && !local.is_meta() && !is_traced(local);
}

Tensor upsample_rule(const Upsample& u, const Tensor& x) {
  if (is_transformed({x})) {
    BelowFunctionLevel below;
    return plain_upsample(u, x);
  }
  TORCH_CHECK_VALUE(
      u.size.size() == u.scales.size(),
      u.op,
      ": expected ",
      u.scales.size(),
      " output sizes, got ",
      IntArrayRef(u.size));
  CommScope scope(u.op);
  const auto plan = find_plan(u, x);
  if (computes_apart(*plan, x)) {
    const auto local = to_local(redistribute(x, plan->call.input));
    return from_local(upsample_apart(local, plan->apart), plan->call.output);
  }
  return run_stencil(x, plan->call, [&](const Tensor& rows) {
    return local_upsample(u, *plan, rows);
  });
}

// ---- the operators ----------------------------------------------------------

const char* name_of(Mode mode, size_t dims) {
  static constexpr const char* names[][3] = {
      {"aten::upsample_nearest1d",
       "aten::upsample_nearest2d",
       "aten::upsample_nearest3d"},
      {"aten::_upsample_nearest_exact1d",
       "aten::_upsample_nearest_exact2d",
       "aten::_upsample_nearest_exact3d"},
      {"aten::upsample_linear1d",
       "aten::upsample_bilinear2d",
       "aten::upsample_trilinear3d"},
      {"", "aten::upsample_bicubic2d", ""}};
  return names[static_cast<size_t>(mode)][dims - 1];
}

/// One scale per dim: upsample_rule<mode, Scale, Scale> is the rule of 2 dims.
template <Mode mode, class... Scales>
Tensor nearest_rule(const Tensor& x, IntArrayRef size, Scales... scales) {
  const auto* op = name_of(mode, sizeof...(Scales));
  return upsample_rule({op, mode, size.vec(), false, {scales...}}, x);
}

template <Mode mode, class... Scales>
Tensor smooth_rule(
    const Tensor& x,
    IntArrayRef size,
    bool align_corners,
    Scales... scales) {
  const auto* op = name_of(mode, sizeof...(Scales));
  return upsample_rule({op, mode, size.vec(), align_corners, {scales...}}, x);
}

using OptionalScales = std::optional<at::ArrayRef<double>>;

/// What torch.nn.functional.interpolate calls: with sizes or scales.
Tensor size_or_scale_rule(
    Mode mode,
    size_t dims,
    const Tensor& x,
    at::OptionalIntArrayRef size,
    bool align_corners,
    OptionalScales scales) {
  const auto sizes =
      at::native::upsample::compute_output_size(x.sizes(), size, scales);
  std::vector<Scale> factors(dims);
  if (scales) {
    factors.assign(scales->begin(), scales->end());
  }
  return upsample_rule(
      {name_of(mode, dims),
       mode,
       {sizes.begin(), sizes.end()},
       align_corners,
       std::move(factors)},
      x);
}

template <Mode mode, size_t dims>
Tensor nearest_vec_rule(
    const Tensor& x,
    at::OptionalIntArrayRef size,
    OptionalScales scales) {
  return size_or_scale_rule(mode, dims, x, size, false, scales);
}

template <Mode mode, size_t dims>
Tensor smooth_vec_rule(
    const Tensor& x,
    at::OptionalIntArrayRef size,
    bool align_corners,
    OptionalScales scales) {
  return size_or_scale_rule(mode, dims, x, size, align_corners, scales);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("upsample_nearest1d", nearest_rule<Mode::Nearest, Scale>);
  m.impl("upsample_nearest2d", nearest_rule<Mode::Nearest, Scale, Scale>);
  m.impl(
      "upsample_nearest3d", nearest_rule<Mode::Nearest, Scale, Scale, Scale>);
  m.impl("_upsample_nearest_exact1d", nearest_rule<Mode::NearestExact, Scale>);
  m.impl(
      "_upsample_nearest_exact2d",
      nearest_rule<Mode::NearestExact, Scale, Scale>);
  m.impl(
      "_upsample_nearest_exact3d",
      nearest_rule<Mode::NearestExact, Scale, Scale, Scale>);
  m.impl("upsample_linear1d", smooth_rule<Mode::Linear, Scale>);
  m.impl("upsample_bilinear2d", smooth_rule<Mode::Linear, Scale, Scale>);
  m.impl(
      "upsample_trilinear3d", smooth_rule<Mode::Linear, Scale, Scale, Scale>);
  m.impl("upsample_bicubic2d", smooth_rule<Mode::Cubic, Scale, Scale>);
  m.impl("upsample_nearest1d.vec", nearest_vec_rule<Mode::Nearest, 1>);
  m.impl("upsample_nearest2d.vec", nearest_vec_rule<Mode::Nearest, 2>);
  m.impl("upsample_nearest3d.vec", nearest_vec_rule<Mode::Nearest, 3>);
  m.impl(
      "_upsample_nearest_exact1d.vec", nearest_vec_rule<Mode::NearestExact, 1>);
  m.impl(
      "_upsample_nearest_exact2d.vec", nearest_vec_rule<Mode::NearestExact, 2>);
  m.impl(
      "_upsample_nearest_exact3d.vec", nearest_vec_rule<Mode::NearestExact, 3>);
  m.impl("upsample_linear1d.vec", smooth_vec_rule<Mode::Linear, 1>);
  m.impl("upsample_bilinear2d.vec", smooth_vec_rule<Mode::Linear, 2>);
  m.impl("upsample_trilinear3d.vec", smooth_vec_rule<Mode::Linear, 3>);
  m.impl("upsample_bicubic2d.vec", smooth_vec_rule<Mode::Cubic, 2>);
}

} // namespace shardtensor
