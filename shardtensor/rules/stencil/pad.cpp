// Padding at the function level. The rank that owns the first or last row owns
// what is padded before or after it: a constant needs no communication, the
// other modes fetch the rows that they repeat.
#include <algorithm>
#include <limits>
#include <map>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_pad_circular_ops.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/reflection_pad1d_ops.h>
#include <ATen/ops/reflection_pad2d_ops.h>
#include <ATen/ops/reflection_pad3d_ops.h>
#include <ATen/ops/replication_pad1d_ops.h>
#include <ATen/ops/replication_pad2d_ops.h>
#include <ATen/ops/replication_pad3d_ops.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/layout/plans/transfer.h"
#include "shardtensor/rules/stencil/plan_tensors.h"
#include "shardtensor/rules/stencil/run_stencil.h"
#include "shardtensor/tensor/order_in_memory.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;

/// What is added along one dim; negative amounts remove rows.
struct Padding {
  int64_t before = 0;
  int64_t after = 0;
};

/// PyTorch lists padding from the last dim backwards.
std::vector<Padding> padding_by_dim(int64_t ndim, IntArrayRef pad) {
  std::vector<Padding> result(ndim);
  for (size_t i = 0; i + 1 < pad.size(); i += 2) {
    result.at(ndim - 1 - static_cast<int64_t>(i / 2)) = {pad[i], pad[i + 1]};
  }
  return result;
}

Stencil padding_stencil(const Padding& padding, int64_t extent) {
  return Stencil::conv(
      {1, 1, padding.before, 1},
      extent,
      extent + padding.before + padding.after);
}

/// The layout of the padded tensor.
SpecPtr padded_layout(
    const SpecPtr& spec,
    const std::vector<Padding>& padding) {
  auto sizes = spec->sizes();
  auto partitions = spec->partitions();
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    sizes[dim] += padding[dim].before + padding[dim].after;
    if (partitions[dim]) {
      partitions[dim] = own_outputs(
          padding_stencil(padding[dim], spec->size(dim)), *partitions[dim]);
    }
  }
  return make_spec(spec->mesh(), sizes, spec->placements(), partitions);
}

/// The input rows that a rank's outputs stand for.
Interval rows_of(
    const SpecPtr& padded,
    const std::vector<Padding>& padding,
    int64_t dim,
    int64_t position) {
  return padded->interval(dim, position).shifted(-padding[dim].before);
}

// ---- a constant -------------------------------------------------------------

/// What this rank adds to its own rows or removes from them.
std::vector<int64_t> local_padding(
    const SpecPtr& input,
    const SpecPtr& output,
    const std::vector<Padding>& padding) {
  std::vector<int64_t> pad;
  for (int64_t dim = input->dim(); dim-- > 0;) {
    const Interval own = input->interval(dim);
    const Interval rows =
        rows_of(output, padding, dim, input->mesh()->position());
    if (rows.empty()) {
      pad.insert(pad.end(), {-own.extent(), 0});
    } else {
      pad.insert(pad.end(), {own.begin - rows.begin, rows.end - own.end});
    }
  }
  return pad;
}

struct ConstantPadPlan {
  SpecPtr input;
  SpecPtr output;
  std::vector<int64_t> local; // as PyTorch lists it
};

ConstantPadPlan plan_constant_pad(const SpecPtr& spec, IntArrayRef pad) {
  const auto padding = padding_by_dim(spec->dim(), pad);
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    const auto removed = std::min<int64_t>(padding[dim].before, 0) +
        std::min<int64_t>(padding[dim].after, 0);
    TORCH_CHECK(
        spec->size(dim) + removed >= 0,
        "aten::constant_pad_nd: padding ",
        pad,
        " removes more than the ",
        spec->size(dim),
        " rows of dim ",
        dim);
  }
  ConstantPadPlan plan{stencil_layout(spec, {}), {}, {}};
  plan.output = padded_layout(plan.input, padding);
  if (spec->mesh()->contains_this_rank()) {
    plan.local = local_padding(plan.input, plan.output, padding);
  }
  return plan;
}

/// PyTorch clones what is left where nothing is added.
std::vector<int64_t> padded_strides(
    const Tensor& x,
    IntArrayRef pad,
    const std::vector<int64_t>& sizes) {
  const bool adds =
      std::ranges::any_of(pad, [](int64_t rows) { return rows > 0; });
  return adds ? strides_of_format(x.suggest_memory_format(), sizes)
              : order_in_memory(x, sizes);
}

Tensor constant_pad_function(
    const Tensor& x,
    IntArrayRef pad,
    const at::Scalar& value) {
  TORCH_CHECK(
      pad.size() % 2 == 0 && static_cast<int64_t>(pad.size()) <= 2 * x.dim(),
      "aten::constant_pad_nd: expected a pair of numbers for at most ",
      x.dim(),
      " dims, got ",
      pad);
  static PlanCache<ConstantPadPlan> plans;
  PlanKey key;
  key.add(spec(x)).add(pad);
  const auto plan =
      plans.find(key, [&] { return plan_constant_pad(spec(x), pad); });
  const Tensor local = to_local(redistribute(x, plan->input));
  return from_local_strided(
      plan->input->mesh()->contains_this_rank()
          ? at::constant_pad_nd(local, plan->local, value)
          : local.new_zeros(plan->output->local_sizes()),
      plan->output,
      padded_strides(x, pad, plan->output->sizes()));
}

// ---- rows of the input again ------------------------------------------------

struct PadPlan {
  SpecPtr input;
  SpecPtr output;
  EncodedExchange gather; // local rows, too
  std::map<int64_t, std::vector<int64_t>> chosen; // of gathered ones, by dim

  int64_t bytes() const {
    auto result = static_cast<int64_t>(sizeof(*this)) + gather.bytes();
    for (const auto& [_, rows] : chosen) {
      result += static_cast<int64_t>(rows.size() * sizeof(int64_t));
    }
    return result;
  }
};

// A row that stands alone is a box of its own. From so many on a rank gathers
// the rows that lie between them, and chooses among these.
constexpr size_t kManyRuns = 256;

/// The rows from the first to the last that are named; every row is.
Interval span_of(const RowSource& rows) {
  Interval span = {std::numeric_limits<int64_t>::max(), 0};
  for (const auto& [begin, extent] : rows.runs()) {
    span.begin = std::min(span.begin, begin);
    span.end = std::max(span.end, begin + extent);
  }
  return span;
}

std::vector<int64_t> rows_within(const RowSource& rows, const Interval& span) {
  std::vector<int64_t> result;
  result.reserve(rows.extent());
  for (const auto& [begin, extent] : rows.runs()) {
    for (int64_t row = begin; row < begin + extent; ++row) {
      result.push_back(row - span.begin);
    }
  }
  return result;
}

/// Removing rows comes first where the domain is a ring.
RowSource source_rows(
    const Interval& rows,
    int64_t extent,
    const Padding& padding,
    Boundary boundary) {
  Interval ring{0, extent};
  if (boundary == Boundary::Periodic) {
    ring.begin = std::max<int64_t>(0, -padding.before);
    ring.end = extent - std::max<int64_t>(0, -padding.after);
  }
  return boundary_rows(rows.shifted(-ring.begin), ring.extent(), boundary)
      .shifted(ring.begin);
}

PadPlan plan_pad(
    const SpecPtr& spec,
    const std::vector<Padding>& padding,
    Boundary boundary) {
  const SpecPtr input = stencil_layout(spec, {});
  PadPlan plan{input, padded_layout(input, padding), {}, {}};
  const auto wanted = [&](int64_t dim, int64_t position) {
    return source_rows(
        rows_of(plan.output, padding, dim, position),
        input->size(dim),
        padding[dim],
        boundary);
  };
  const auto gathered = [&](int64_t dim, int64_t position) {
    auto rows = wanted(dim, position);
    if (rows.runs().size() > kManyRuns) {
      const auto span = span_of(rows);
      rows = {};
      rows.append(span);
    }
    return rows;
  };
  std::vector<int64_t> padded;
  for (int64_t dim = 0; dim < input->dim(); ++dim) {
    if (padding[dim].before != 0 || padding[dim].after != 0) {
      padded.push_back(dim);
    }
  }
  const Mesh& mesh = *input->mesh();
  if (mesh.contains_this_rank()) {
    plan.gather = encode(
        plan_gather_rows(input, padded, gathered, mesh.position()), mesh);
    for (const int64_t dim : padded) {
      const auto rows = wanted(dim, mesh.position());
      if (rows.runs().size() > kManyRuns) {
        plan.chosen[dim] = rows_within(rows, span_of(rows));
      }
    }
  }
  return plan;
}

using PlainPad = Tensor (*)(const Tensor&, c10::SymIntArrayRef);

Tensor pad_with_rows(
    const char* op,
    Boundary boundary,
    PlainPad plain,
    const Tensor& x,
    IntArrayRef pad) {
  static PlanCache<PadPlan> plans;
  PlanKey key;
  key.add(spec(x)).add(pad).add(static_cast<int64_t>(boundary));
  const auto plan = plans.find(key, [&] {
    const auto dims = static_cast<int64_t>(pad.size() / 2);
    infer_sizes(op, x, dims, [&](const Tensor& t) { // for its checks
      return plain(t, c10::fromIntArrayRefSlow(pad));
    });
    return plan_pad(spec(x), padding_by_dim(x.dim(), pad), boundary);
  });
  const Tensor local = to_local(redistribute(x, plan->input));
  const auto format = boundary == Boundary::Periodic // composed by copies
      ? at::MemoryFormat::Contiguous
      : format_on(x);
  if (!plan->input->mesh()->contains_this_rank()) {
    return from_local(
        local.new_zeros(plan->output->local_sizes()), plan->output, format);
  }
  auto rows = exchange(local, plan->gather, x.suggest_memory_format());
  for (const auto& [dim, chosen] : plan->chosen) {
    rows = rows.index_select(dim, index_tensor(chosen, rows));
  }
  return from_local(rows, plan->output, format);
}

// ---- the operators ----------------------------------------------------------

template <class Op, Boundary boundary>
Tensor pad_function(const Tensor& x, IntArrayRef pad) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      boundary == Boundary::Periodic || x.scalar_type() != at::kBool,
      Op::name,
      " not implemented for 'Bool'");
  return pad_with_rows(
      Op::name, boundary, Op::call, autocast_to_float(Op::name, x), pad);
}

namespace ops = at::_ops;

template <class Op, Boundary boundary>
constexpr auto padded = function_rule<Op, pad_function<Op, boundary>>;

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "constant_pad_nd",
      function_rule<ops::constant_pad_nd, constant_pad_function>);
  m.impl("reflection_pad1d", padded<ops::reflection_pad1d, Boundary::Reflect>);
  m.impl("reflection_pad2d", padded<ops::reflection_pad2d, Boundary::Reflect>);
  m.impl("reflection_pad3d", padded<ops::reflection_pad3d, Boundary::Reflect>);
  m.impl(
      "replication_pad1d", padded<ops::replication_pad1d, Boundary::Replicate>);
  m.impl(
      "replication_pad2d", padded<ops::replication_pad2d, Boundary::Replicate>);
  m.impl(
      "replication_pad3d", padded<ops::replication_pad3d, Boundary::Replicate>);
  m.impl("_pad_circular", padded<ops::_pad_circular, Boundary::Periodic>);
}

} // namespace shardtensor::detail
