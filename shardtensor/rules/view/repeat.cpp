#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/repeat_ops.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/halo/stencil.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/tensor/known_zeros.h"

// Dims repeated, rolled and flipped, and what is left of a triangle.

namespace shardtensor::detail {
namespace {

// ---- repeat -----------------------------------------------------------------

/// A repeated cut dim is cut repeatedly: every rank repeats its own rows.
Decision repeat_rule(Call& call) {
  const auto& own = call.operand(0).spec;
  const auto repeats = call.argument("repeats").toIntVector();
  const auto shift = static_cast<int64_t>(repeats.size()) - own->dim();
  TORCH_CHECK(
      shift >= 0,
      "repeat: expected at least as many numbers as dims, got ",
      repeats.size(),
      " for a tensor of ",
      own->dim(),
      " dims");
  std::vector<int64_t> from(repeats.size(), -1);
  std::iota(from.begin() + shift, from.end(), 0);
  ShardSpec::Partitions partitions(repeats.size());
  for (const int64_t dim : own->sharded_dims()) {
    partitions[dim + shift] =
        own->partition(dim).repeated(repeats[dim + shift]);
  }
  Decision decision;
  decision.inputs = {own};
  decision.strides_of = row_major_strides;
  decision.outputs = {with_dims(
      own,
      call.output_sizes().at(0),
      from,
      Placement::replicate(),
      std::move(partitions))};
  return decision;
}

/// ATen's gradient of nothing is a plain tensor of zeros. An empty slice has
/// the same elements, none, and a sharded gradient.
at::Tensor repeat_function(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    at::IntArrayRef repeats) {
  const auto dims = static_cast<int64_t>(repeats.size());
  if (std::find(repeats.begin(), repeats.end(), 0) == repeats.end() ||
      dims < self.dim()) {
    return at::_ops::repeat::redispatch(
        below_function_level(keys), self, c10::fromIntArrayRefSlow(repeats));
  }
  auto kept = self;
  while (kept.dim() < dims) {
    kept = kept.unsqueeze(0);
  }
  std::vector<int64_t> copies(repeats.begin(), repeats.end());
  for (int64_t dim = 0; dim < dims; ++dim) {
    if (repeats[dim] == 0) {
      kept = kept.narrow(dim, 0, 0);
      copies[dim] = 1;
    }
  }
  return kept.repeat(copies);
}

// ---- roll and flip ----------------------------------------------------------

/// Where the rows come from that a piece has of a dim.
using SourceOfRows =
    std::function<RowSource(int64_t dim, const Interval& rows)>;

EncodedExchange plan_rows(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    const SourceOfRows& source) {
  const auto rows = [&](int64_t dim, int64_t position) {
    return source(dim, spec->interval(dim, position));
  };
  const auto& mesh = *spec->mesh();
  return encode(plan_gather_rows(spec, dims, rows, mesh.position()), mesh);
}

/// Every rank's rows along the sharded `dims`, taken from where `source` says,
/// in the layout of `spec` of a tensor that shows `format`.
/// Planned once for `op`, a literal, and `arguments`, which say what `source`
/// does. Communication: one exchange.
at::Tensor take_rows(
    const char* op,
    const std::vector<int64_t>& arguments,
    const at::Tensor& local,
    const SpecPtr& spec,
    at::MemoryFormat format,
    const std::vector<int64_t>& dims,
    const SourceOfRows& source) {
  if (dims.empty()) {
    return local;
  }
  static PlanCache<EncodedExchange> plans;
  PlanKey key;
  key.add(reinterpret_cast<int64_t>(op)).add(spec).add(dims).add(arguments);
  const auto plan =
      plans.find(key, [&] { return plan_rows(spec, dims, source); });
  return exchange(local, *plan, format);
}

/// Dims and how far each is rolled; a dim that is named twice rolls twice.
std::map<int64_t, int64_t> shifts_of(
    const at::Tensor& self,
    at::IntArrayRef shifts,
    at::IntArrayRef dims) {
  std::map<int64_t, int64_t> result;
  for (size_t i = 0; i < dims.size(); ++i) {
    const auto dim = at::maybe_wrap_dim(dims[i], self.dim());
    if (const auto size = self.size(dim); size > 0) {
      auto& shift = result[dim];
      shift = (shift + shifts[i] % size + size) % size;
    }
  }
  return result;
}

/// Of a rolled tensor: CUDA's kernel makes it row-major, the CPU's where a dim
/// goes around as a whole.
at::MemoryFormat rolled_format(
    const at::Tensor& self,
    const std::map<int64_t, int64_t>& rolled) {
  const bool row_major =
      self.is_cuda() || std::ranges::any_of(rolled, [](const auto& of_dim) {
        return of_dim.second == 0;
      });
  return row_major ? at::MemoryFormat::Contiguous
                   : self.suggest_memory_format();
}

at::Tensor roll_kernel(
    const at::Tensor& self,
    at::IntArrayRef shifts,
    at::IntArrayRef dims) {
  if (dims.empty()) {
    TORCH_CHECK(
        shifts.size() == 1,
        "roll: expected one shift without dims, got ",
        shifts);
    return self.flatten().roll(shifts, 0).reshape(self.sizes());
  }
  TORCH_CHECK(
      shifts.size() == dims.size(),
      "roll: expected as many shifts as dims, got shifts ",
      shifts,
      ", dims ",
      dims);
  auto [local, layout] = local_of(self, contiguous(spec(self)));
  const auto rolled = shifts_of(self, shifts, dims);
  const auto format = rolled_format(self, rolled);
  std::vector<int64_t> cut;
  std::vector<int64_t> shifts_of_cut;
  for (const auto& [dim, shift] : rolled) {
    if (layout->is_sharded(dim)) {
      cut.push_back(dim);
      shifts_of_cut.push_back(shift);
    } else {
      local = local.roll(shift, dim);
    }
  }
  const auto from = [&](int64_t dim, const Interval& rows) {
    return boundary_rows(
        rows.shifted(-rolled.at(dim)), self.size(dim), Boundary::Periodic);
  };
  local = take_rows("roll", shifts_of_cut, local, layout, format, cut, from);
  const auto result = wrap(
      local.is_alias_of(impl_of(self)->local()) ? local.clone() : local,
      layout,
      strides_of_format(format, self.sizes().vec()));
  if (const auto* known = nonzero_box(self)) {
    auto box = *known;
    for (const auto& [dim, shift] : rolled) {
      box[dim] = {0, self.size(dim)};
    }
    note_known_zeros(result, std::move(box));
  }
  return result;
}

/// Each rank gets its rows' mirror images in increasing order, in one piece per
/// peer, and flips them.
at::Tensor flip_kernel(const at::Tensor& self, at::IntArrayRef dims) {
  auto [local, layout] = local_of(self, contiguous(spec(self)));
  std::vector<int64_t> wrapped;
  std::vector<int64_t> cut;
  for (const int64_t given : dims) {
    const auto dim = at::maybe_wrap_dim(given, self.dim());
    TORCH_CHECK(
        std::find(wrapped.begin(), wrapped.end(), dim) == wrapped.end(),
        "flip: a dim appears twice in ",
        dims);
    wrapped.push_back(dim);
    if (self.dim() > 0 && layout->is_sharded(dim)) {
      cut.push_back(dim);
    }
  }
  const auto from_the_end = [&](int64_t dim, const Interval& rows) {
    RowSource source;
    source.append(
        Interval{self.size(dim) - rows.end, self.size(dim) - rows.begin});
    return source;
  };
  local = take_rows(
      "flip",
      {},
      local,
      layout,
      self.suggest_memory_format(),
      cut,
      from_the_end);
  return wrap(
      local.flip(wrapped),
      layout,
      at::infer_dense_strides(self.sizes(), self.strides()));
}

// ---- triangles --------------------------------------------------------------

/// Column j of row i is kept by its distance from the diagonal, which every
/// rank counts from where its piece begins.
Decision triangle_rule(Call& call) {
  const auto& own = call.operand(0).spec;
  const auto dims = own->dim();
  auto spec = own;
  for (const int64_t dim : {dims - 2, dims - 1}) {
    spec = dim >= 0 ? contiguous_dim(spec, dim) : spec;
  }
  const auto begin = [&](int64_t dim) {
    return dim >= 0 && spec->is_sharded(dim) ? spec->interval(dim).begin : 0;
  };
  Decision decision;
  decision.strides_of = row_major_strides;
  for (const auto& operand : call.operands()) {
    decision.inputs.push_back(operand.spec ? spec : nullptr);
  }
  decision.outputs = {spec};
  decision.arguments.emplace_back(
      call.argument_index("diagonal"),
      call.argument("diagonal").toInt() + begin(dims - 2) - begin(dims - 1));
  return decision;
}

const RegisterRules repeats_and_triangles{
    {"aten::repeat", repeat_rule},
    {"aten::tril", triangle_rule},
    {"aten::triu", triangle_rule},
    {"aten::tril_", triangle_rule},
    {"aten::triu_", triangle_rule},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("roll", roll_kernel);
  m.impl("flip", flip_kernel);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("repeat", function_rule<at::_ops::repeat, repeat_function>);
}

} // namespace shardtensor::detail
