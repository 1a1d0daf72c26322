// Interpolation at the function level. Along a sharded dim the local operator
// is called on the rows that the owned outputs read, where shifting changes
// nothing (see Note [Shift-invariant interpolation]); elsewhere rows are
// weighted one tap at a time. Both give PyTorch's numbers.
//
// Note [Weighted dims stand aside]
// The operator along the other dims takes a weighted one for channels. Passed
// on as a dim that keeps its extent, its rows would be multiplied by one, their
// neighbours by zero, and an infinity or NaN would spread to these. PyTorch has
// no cubic operator of one dim: with one weighted dim all are.
#include <algorithm>
#include <map>

#include <ATen/native/UpSample.h>
#include <ATen/ops/_upsample_bicubic2d_aa_ops.h>
#include <ATen/ops/_upsample_bilinear2d_aa_ops.h>
#include <ATen/ops/_upsample_nearest_exact1d_ops.h>
#include <ATen/ops/_upsample_nearest_exact2d_ops.h>
#include <ATen/ops/_upsample_nearest_exact3d_ops.h>
#include <ATen/ops/upsample_bicubic2d_ops.h>
#include <ATen/ops/upsample_bilinear2d_ops.h>
#include <ATen/ops/upsample_linear1d_ops.h>
#include <ATen/ops/upsample_nearest1d_ops.h>
#include <ATen/ops/upsample_nearest2d_ops.h>
#include <ATen/ops/upsample_nearest3d_ops.h>
#include <ATen/ops/upsample_trilinear3d_ops.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/stencil/run_stencil.h"
#include "shardtensor/rules/stencil/upsample_overlap.h"
#include "shardtensor/rules/stencil/weighted_rows.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Mode = Resample::Mode;

bool is_nearest(const Upsample& u) {
  return u.mode == Mode::Nearest || u.mode == Mode::NearestExact;
}

struct UpsamplePlan {
  StencilCall call;
  std::vector<int64_t> plain_dims; // of the input
  Upsample plain; // the local operator along these
  std::map<int64_t, std::shared_ptr<const WeightedRows>> weighted; // others
  std::shared_ptr<const UpsampleOverlap> overlap; // if that is possible
};

Resample resample_of(const Upsample& u, size_t i, const Tensor& x) {
  Resample how{u.mode, u.align_corners, u.scales[i]};
  how.double_precision = x.scalar_type() == at::kDouble;
  how.is_cuda = x.is_cuda();
  return how;
}

std::vector<Stencil> stencils_of(const Upsample& u, const Tensor& x) {
  std::vector<Stencil> stencils;
  for (size_t i = 0; i < u.size.size(); ++i) {
    stencils.push_back(
        Stencil::resample(
            resample_of(u, i, x),
            x.size(static_cast<int64_t>(i) + 2),
            u.size[i]));
  }
  return stencils;
}

/// What PyTorch does as in no piece: where its kernels differ, which it chooses
/// by device, direction, layout and the width of the image. On the CPU
/// antialiasing is wrong for one column (Note [Images one column wide]).
bool is_odd(const Upsample& u, const Tensor& x) {
  bool odd = is_antialiased(resample_of(u, 0, x)) && !x.is_cuda() &&
      u.size.back() == 1;
  for (size_t i = 0; i < u.size.size(); ++i) {
    odd |= is_ambiguous(
        resample_of(u, i, x), x.size(static_cast<int64_t>(i) + 2), u.size[i]);
  }
  return odd;
}

/// Images of integers have their own fixed-point arithmetic.
std::vector<int64_t> whole_dims(const Upsample& u, const Tensor& x) {
  std::vector<int64_t> whole;
  if (is_odd(u, x) || (!is_nearest(u) && !x.is_floating_point())) {
    for (int64_t dim = 2; dim < x.dim(); ++dim) {
      whole.push_back(dim);
    }
  }
  return whole;
}

/// Which dims are weighted. See Note [Weighted dims stand aside].
std::vector<bool> choose_weighted(
    const Upsample& u,
    const StencilCall& call,
    const std::vector<Stencil>& stencils) {
  std::vector<bool> weighted;
  for (size_t i = 0; i < stencils.size(); ++i) {
    weighted.push_back(call.is_cut[i] && !stencils[i].is_shift_invariant());
  }
  const bool any =
      std::find(weighted.begin(), weighted.end(), true) != weighted.end();
  if (any && u.mode == Mode::Cubic) {
    weighted.assign(weighted.size(), true);
  }
  return weighted;
}

UpsamplePlan plan_upsample(const Upsample& u, const Tensor& x) {
  const auto sizes = infer_sizes(
      u.op, x, u.dims(), [&](const Tensor& t) { return plain_upsample(u, t); });
  const auto stencils = stencils_of(u, x);
  UpsamplePlan plan;
  plan.call = plan_stencil_call(
      spec(x),
      whole_dims(u, x),
      stencils,
      std::vector<int64_t>(u.size.size(), 0),
      sizes);
  plan.plain = {u.op, u.mode, {}, u.align_corners, {}};
  const auto weighted = choose_weighted(u, plan.call, stencils);
  for (size_t i = 0; i < stencils.size(); ++i) {
    const auto& stencil = stencils[i];
    auto& piece = plan.call.pieces[i];
    const auto dim = plan.call.first_dim() + static_cast<int64_t>(i);
    if (weighted[i]) {
      piece.crop = 0; // the owned outputs alone
      plan.weighted[dim] = std::make_shared<WeightedRows>(
          is_nearest(u) ? WeightedRows::Kind::Copies : WeightedRows::Kind::Sums,
          stencil,
          dim,
          plan.call.output->interval(dim),
          piece.rows);
      continue;
    }
    const bool cut = plan.call.is_cut[i];
    plan.plain_dims.push_back(dim);
    plan.plain.size.push_back(cut ? stencil.local_outputs(piece) : u.size[i]);
    plan.plain.scales.push_back(cut ? stencil.local_scale() : u.scales[i]);
  }
  const bool simple = u.mode == Mode::Linear || u.mode == Mode::Cubic;
  if (simple && plan.weighted.empty()) {
    plan.overlap = plan_upsample_overlap(
        plan.call, x.suggest_memory_format(), stencils, plan.plain);
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
      .add(static_cast<int64_t>(x.suggest_memory_format()))
      .add(u.size);
  for (const auto& scale : u.scales) {
    key.add(scale.value_or(0.0));
  }
  return plans.find(key, [&] { return plan_upsample(u, x); });
}

/// See Note [Weighted dims stand aside].
Tensor upsample_plain_dims(const UpsamplePlan& plan, const Tensor& x) {
  if (plan.weighted.empty()) {
    return plain_upsample(plan.plain, x);
  }
  std::vector<int64_t> order{0, 1};
  for (const auto& [dim, rows] : plan.weighted) {
    order.push_back(dim);
  }
  const auto first_plain = static_cast<int64_t>(order.size());
  order.insert(order.end(), plan.plain_dims.begin(), plan.plain_dims.end());
  const Tensor ordered = x.permute(order);
  const Tensor y =
      plain_upsample(plan.plain, ordered.flatten(1, first_plain - 1));
  std::vector<int64_t> back(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    back[order[i]] = static_cast<int64_t>(i);
  }
  return y.unflatten(1, ordered.sizes().slice(1, first_plain - 1))
      .permute(back);
}

/// Everything after the exchange, up to rows that nobody keeps.
Tensor local_upsample(const UpsamplePlan& plan, const Tensor& rows) {
  Tensor y = plan.plain_dims.empty() ? rows : upsample_plain_dims(plan, rows);
  // Weights are applied in float as PyTorch does, rounding at the end.
  const bool widen =
      !is_nearest(plan.plain) && c10::isReducedFloatingType(rows.scalar_type());
  for (const auto& [_, weighted] : plan.weighted) {
    y = weighted_rows(widen ? y.to(at::kFloat) : y, weighted);
  }
  return y.to(rows.scalar_type());
}

/// A compiler has its own way with the local operator; its parts are fused.
bool overlaps(const UpsamplePlan& plan, const Tensor& x) {
  const auto& local = impl_of(x)->local();
  const bool wide =
      local.scalar_type() == at::kFloat || local.scalar_type() == at::kDouble;
  return plan.overlap && wide && !local.is_meta() && !is_traced(local);
}

Tensor upsampled(const Upsample& u, const Tensor& input) {
  TORCH_CHECK_VALUE(
      u.size.size() == u.scales.size(),
      u.op,
      ": expected ",
      u.scales.size(),
      " output sizes, got ",
      IntArrayRef(u.size));
  const Tensor x = autocast_to_float(u.op, input);
  const auto plan = find_plan(u, x);
  if (overlaps(*plan, x)) {
    const auto local = to_local(redistribute(x, plan->call.input));
    return from_local(
        upsample_overlap(local, plan->overlap),
        plan->call.output,
        x.suggest_memory_format());
  }
  return run_stencil(x, plan->call, [&](const Tensor& rows) {
    return local_upsample(*plan, rows);
  });
}

// ---- the operators ----------------------------------------------------------

/// One scale per dim: nearest_function<Op, Mode::Nearest, Scale, Scale> has
/// two.
template <class Op, Mode mode, class... Scales>
Tensor nearest_function(const Tensor& x, IntArrayRef size, Scales... scales) {
  return upsampled({Op::name, mode, size.vec(), false, {scales...}}, x);
}

template <class Op, Mode mode, class... Scales>
Tensor smooth_function(
    const Tensor& x,
    IntArrayRef size,
    bool align_corners,
    Scales... scales) {
  return upsampled({Op::name, mode, size.vec(), align_corners, {scales...}}, x);
}

using OptionalScales = std::optional<at::ArrayRef<double>>;

/// What torch.nn.functional.interpolate calls: with sizes or scales.
Tensor upsampled_by_size_or_scale(
    const char* op,
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
  return upsampled(
      {op,
       mode,
       {sizes.begin(), sizes.end()},
       align_corners,
       std::move(factors)},
      x);
}

template <class Op, Mode mode, size_t dims>
Tensor nearest_vec_function(
    const Tensor& x,
    at::OptionalIntArrayRef size,
    OptionalScales scales) {
  return upsampled_by_size_or_scale(
      Op::name, mode, dims, x, size, false, scales);
}

template <class Op, Mode mode, size_t dims>
Tensor smooth_vec_function(
    const Tensor& x,
    at::OptionalIntArrayRef size,
    bool align_corners,
    OptionalScales scales) {
  return upsampled_by_size_or_scale(
      Op::name, mode, dims, x, size, align_corners, scales);
}

namespace ops = at::_ops;

template <class Op, Mode mode, class... Scales>
constexpr auto nearest =
    function_rule<Op, nearest_function<Op, mode, Scales...>>;
template <class Op, Mode mode, class... Scales>
constexpr auto smooth = function_rule<Op, smooth_function<Op, mode, Scales...>>;
template <class Op, Mode mode, size_t dims>
constexpr auto nearest_vec =
    function_rule<Op, nearest_vec_function<Op, mode, dims>>;
template <class Op, Mode mode, size_t dims>
constexpr auto smooth_vec =
    function_rule<Op, smooth_vec_function<Op, mode, dims>>;

constexpr auto kNearest = Mode::Nearest;
constexpr auto kExact = Mode::NearestExact;
constexpr auto kLinear = Mode::Linear;
constexpr auto kCubic = Mode::Cubic;
constexpr auto kLinearAntialias = Mode::LinearAntialias;
constexpr auto kCubicAntialias = Mode::CubicAntialias;

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "upsample_nearest1d", nearest<ops::upsample_nearest1d, kNearest, Scale>);
  m.impl(
      "upsample_nearest2d",
      nearest<ops::upsample_nearest2d, kNearest, Scale, Scale>);
  m.impl(
      "upsample_nearest3d",
      nearest<ops::upsample_nearest3d, kNearest, Scale, Scale, Scale>);
  m.impl(
      "_upsample_nearest_exact1d",
      nearest<ops::_upsample_nearest_exact1d, kExact, Scale>);
  m.impl(
      "_upsample_nearest_exact2d",
      nearest<ops::_upsample_nearest_exact2d, kExact, Scale, Scale>);
  m.impl(
      "_upsample_nearest_exact3d",
      nearest<ops::_upsample_nearest_exact3d, kExact, Scale, Scale, Scale>);
  m.impl("upsample_linear1d", smooth<ops::upsample_linear1d, kLinear, Scale>);
  m.impl(
      "upsample_bilinear2d",
      smooth<ops::upsample_bilinear2d, kLinear, Scale, Scale>);
  m.impl(
      "upsample_trilinear3d",
      smooth<ops::upsample_trilinear3d, kLinear, Scale, Scale, Scale>);
  m.impl(
      "upsample_bicubic2d",
      smooth<ops::upsample_bicubic2d, kCubic, Scale, Scale>);
  m.impl(
      "upsample_nearest1d.vec",
      nearest_vec<ops::upsample_nearest1d_vec, kNearest, 1>);
  m.impl(
      "upsample_nearest2d.vec",
      nearest_vec<ops::upsample_nearest2d_vec, kNearest, 2>);
  m.impl(
      "upsample_nearest3d.vec",
      nearest_vec<ops::upsample_nearest3d_vec, kNearest, 3>);
  m.impl(
      "_upsample_nearest_exact1d.vec",
      nearest_vec<ops::_upsample_nearest_exact1d_vec, kExact, 1>);
  m.impl(
      "_upsample_nearest_exact2d.vec",
      nearest_vec<ops::_upsample_nearest_exact2d_vec, kExact, 2>);
  m.impl(
      "_upsample_nearest_exact3d.vec",
      nearest_vec<ops::_upsample_nearest_exact3d_vec, kExact, 3>);
  m.impl(
      "upsample_linear1d.vec",
      smooth_vec<ops::upsample_linear1d_vec, kLinear, 1>);
  m.impl(
      "upsample_bilinear2d.vec",
      smooth_vec<ops::upsample_bilinear2d_vec, kLinear, 2>);
  m.impl(
      "upsample_trilinear3d.vec",
      smooth_vec<ops::upsample_trilinear3d_vec, kLinear, 3>);
  m.impl(
      "upsample_bicubic2d.vec",
      smooth_vec<ops::upsample_bicubic2d_vec, kCubic, 2>);
  m.impl(
      "_upsample_bilinear2d_aa",
      smooth<ops::_upsample_bilinear2d_aa, kLinearAntialias, Scale, Scale>);
  m.impl(
      "_upsample_bicubic2d_aa",
      smooth<ops::_upsample_bicubic2d_aa, kCubicAntialias, Scale, Scale>);
  m.impl(
      "_upsample_bilinear2d_aa.vec",
      smooth_vec<ops::_upsample_bilinear2d_aa_vec, kLinearAntialias, 2>);
  m.impl(
      "_upsample_bicubic2d_aa.vec",
      smooth_vec<ops::_upsample_bicubic2d_aa_vec, kCubicAntialias, 2>);
}

} // namespace shardtensor::detail
