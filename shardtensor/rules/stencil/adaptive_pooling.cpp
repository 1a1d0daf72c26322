// Adaptive pooling at the function level. Output o reads the rows
// [o * I / O, (o + 1) * I / O), rounded outwards. Where O divides I, or a dim
// is not sharded, the local operator does it; elsewhere windows are reduced one
// dim at a time.
#include <algorithm>
#include <numeric>

#include <ATen/Dispatch.h>
#include <ATen/ops/_adaptive_avg_pool2d.h>
#include <ATen/ops/_adaptive_avg_pool3d.h>
#include <ATen/ops/adaptive_avg_pool1d_ops.h>
#include <ATen/ops/adaptive_avg_pool2d_ops.h>
#include <ATen/ops/adaptive_avg_pool3d_ops.h>
#include <ATen/ops/adaptive_max_pool1d.h>
#include <ATen/ops/adaptive_max_pool2d.h>
#include <ATen/ops/adaptive_max_pool3d.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/stencil/global_indices.h"
#include "shardtensor/rules/stencil/plan_tensors.h"
#include "shardtensor/rules/stencil/run_stencil.h"
#include "shardtensor/rules/stencil/weighted_rows.h"
#include "shardtensor/tensor/shard_tensor_impl.h"
#include "shardtensor/threads/parallel_for.h"

namespace shardtensor::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;

struct Adaptive {
  const char* op;
  int64_t dims;
  IntArrayRef size;
  bool is_max;
};

/// Along a dim that we reduce: an output's rows are plan.stencil.reads(o).
using Windows = std::shared_ptr<const WeightedRows>;

struct AdaptivePlan {
  StencilCall call;
  std::vector<int64_t> size; // of the local operator
  bool calls_plain = false;
  std::vector<Windows> windows; // of dims reduced by us; null: of others
};

Stencil adaptive_stencil(int64_t input, int64_t output) {
  if (output > 0 && input % output == 0) {
    const int64_t window = input / output;
    return Stencil::pool({window, window, 0, 1}, input, output);
  }
  return Stencil::adaptive(input, output);
}

// Note [First maximum]
// Of several equal elements the first in row-major order is the maximum. Dims
// reduced one after the other, the last first, keep that order; the local
// operator for some dims and ours for others would not.
AdaptivePlan plan_adaptive(
    const Adaptive& pool,
    const Tensor& x,
    const std::function<Tensor(const Tensor&)>& plain) {
  for (const int64_t size : pool.size) {
    TORCH_CHECK(
        size >= 0,
        pool.op,
        ": elements of output_size must be greater than or equal to 0, got ",
        pool.size);
  }
  const auto sizes = infer_sizes(pool.op, x, pool.dims, plain);
  const int64_t first = x.dim() - pool.dims;
  const auto n = static_cast<size_t>(pool.dims);
  std::vector<Stencil> stencils;
  for (int64_t dim = first; dim < x.dim(); ++dim) {
    stencils.push_back(adaptive_stencil(x.size(dim), sizes[dim]));
  }
  AdaptivePlan plan{
      plan_stencil_call(
          spec(x), {}, stencils, std::vector<int64_t>(n, 0), sizes),
      {},
      false,
      std::vector<Windows>(n)};
  const auto reduce = [&](size_t i) {
    const auto dim = first + static_cast<int64_t>(i);
    plan.windows[i] = std::make_shared<WeightedRows>(
        WeightedRows::Kind::Averages,
        Stencil::adaptive(x.size(dim), sizes[dim]),
        dim,
        plan.call.output->interval(dim),
        plan.call.pieces[i].rows);
  };
  bool any = false;
  for (size_t i = 0; i < n; ++i) {
    const auto dim = first + static_cast<int64_t>(i);
    const auto& piece = plan.call.pieces[i];
    const bool divides = sizes[dim] > 0 && x.size(dim) % sizes[dim] == 0;
    if (plan.call.is_cut[i] && !divides) {
      any = true;
      plan.size.push_back(piece.rows.extent()); // as it is, reduced later
      reduce(i);
    } else {
      plan.calls_plain = true;
      plan.size.push_back(std::max<int64_t>(1, piece.outputs));
    }
  }
  if (any && pool.is_max) { // see Note [First maximum]
    plan.calls_plain = false;
    for (size_t i = 0; i < n; ++i) {
      reduce(i);
    }
  }
  return plan;
}

std::shared_ptr<const AdaptivePlan> find_plan(
    const Adaptive& pool,
    const Tensor& x,
    const std::function<Tensor(const Tensor&)>& plain) {
  static PlanCache<AdaptivePlan> plans;
  PlanKey key;
  key.add(spec(x)).add(pool.dims).add(pool.size).add(
      static_cast<int64_t>(pool.is_max));
  return plans.find(key, [&] { return plan_adaptive(pool, x, plain); });
}

// ---- averages ---------------------------------------------------------------

// The composite operators take the mean for a single output, with another
// second derivative: ranks must not differ in what they compute.
Tensor plain_average(const Tensor& x, IntArrayRef size) {
  switch (size.size()) {
    case 1:
      return at::_adaptive_avg_pool2d(x.unsqueeze(-2), {1, size[0]})
          .squeeze(-2);
    case 2:
      return at::_adaptive_avg_pool2d(x, size);
    default:
      return at::_adaptive_avg_pool3d(x, size);
  }
}

Tensor local_average(const AdaptivePlan& plan, const Tensor& rows) {
  Tensor y = plan.calls_plain ? plain_average(rows, plan.size) : rows;
  const bool widen = c10::isReducedFloatingType(rows.scalar_type());
  for (const auto& windows : plan.windows) {
    if (windows) {
      y = weighted_rows(widen ? y.to(at::kFloat) : y, windows);
    }
  }
  return y.to(rows.scalar_type());
}

/// The dims of which a single output is left, if one of them is sharded: every
/// rank adds its rows to the mean, nobody gathers them.
std::vector<int64_t> dims_to_mean(const Tensor& x, IntArrayRef size) {
  const int64_t first = x.dim() - static_cast<int64_t>(size.size());
  std::vector<int64_t> dims;
  bool sharded = false;
  for (int64_t dim = first; first > 0 && dim < x.dim(); ++dim) {
    if (size[dim - first] == 1 && x.size(dim) > 1) {
      dims.push_back(dim);
      sharded |= spec(x)->is_sharded(dim);
    }
  }
  return sharded ? dims : std::vector<int64_t>{};
}

Tensor averaged(const Adaptive& pool, const Tensor& input) {
  const auto plain = [&](const Tensor& x) {
    return plain_average(x, pool.size);
  };
  const auto whole = dims_to_mean(input, pool.size);
  const Tensor x = whole.empty() ? input : at::mean(input, whole, true);
  const auto plan = find_plan(pool, x, plain);
  const auto format = pool.size.size() == 3 ? at::MemoryFormat::Contiguous
                                            : input.suggest_memory_format();
  return run_stencil(x, plan->call, format, [&](const Tensor& rows) {
    return local_average(*plan, rows);
  });
}

// ---- maxima -----------------------------------------------------------------

// Windows that are worth a thread.
constexpr int64_t kWindowsPerThread = 1 << 12;

Pair plain_maximum(const Tensor& x, IntArrayRef size) {
  switch (size.size()) {
    case 1:
      return at::adaptive_max_pool1d(x, size);
    case 2:
      return at::adaptive_max_pool2d(x, size);
    default:
      return at::adaptive_max_pool3d(x, size);
  }
}

/// The local row of each window's maximum along `dim`: the first, or the last
/// NaN, as PyTorch's kernels take it.
template <class S>
Tensor rows_of_maxima(
    const Tensor& given,
    int64_t dim,
    const WeightedRows& windows) {
  const Tensor values = given.detach().contiguous();
  auto sizes = values.sizes().vec();
  sizes[dim] = windows.outputs.extent();
  const Tensor found = at::empty(sizes, values.options().dtype(at::kLong));
  const auto* const from = values.const_data_ptr<S>();
  auto* const to = found.mutable_data_ptr<int64_t>();
  const int64_t rows = values.size(dim);
  const int64_t inner = c10::multiply_integers(values.sizes().slice(dim + 1));
  const int64_t all = windows.outputs.extent() *
      c10::multiply_integers(values.sizes().slice(0, dim));
  parallel_for(all, kWindowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t outer = i / windows.outputs.extent();
      const auto window =
          windows.stencil
              .reads(windows.outputs.begin + i % windows.outputs.extent())
              .shifted(-windows.rows.begin);
      for (int64_t k = 0; k < inner; ++k) {
        const auto* const column = from + outer * rows * inner + k;
        int64_t largest = window.begin;
        for (int64_t row = window.begin + 1; row < window.end; ++row) {
          const S value = column[row * inner];
          if (value > column[largest * inner] || value != value) {
            largest = row;
          }
        }
        to[i * inner + k] = largest;
      }
    }
  });
  return found;
}

/// The same by operators: windows padded to one extent by repeating their last
/// row, which is never the first maximum.
Tensor rows_of_maxima_by_operators(
    const Tensor& values,
    int64_t dim,
    const WeightedRows& windows) {
  const auto& outputs = windows.outputs;
  int64_t longest = 1;
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    longest = std::max(longest, windows.stencil.reads(o).extent());
  }
  std::vector<int64_t> rows;
  rows.reserve(outputs.extent() * longest);
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    const auto window = windows.stencil.reads(o).shifted(-windows.rows.begin);
    for (int64_t j = 0; j < longest; ++j) {
      rows.push_back(std::min(window.begin + j, window.end - 1));
    }
  }
  const std::vector<int64_t> shape{outputs.extent(), longest};
  const auto index = index_tensor(rows, values);
  const auto all =
      values.detach().index_select(dim, index).unflatten(dim, shape);
  // Of several NaN PyTorch's kernels take the last, its max the first.
  const auto is_nan = all.isnan();
  const auto last =
      is_nan.flip(dim + 1).to(at::kByte).argmax(dim + 1, /*keepdim=*/true);
  const auto at = at::where(
      is_nan.any(dim + 1, /*keepdim=*/true),
      last.neg().add(longest - 1),
      all.argmax(dim + 1, /*keepdim=*/true));
  std::vector<int64_t> spread(all.dim(), 1);
  spread[dim] = shape[0];
  spread[dim + 1] = shape[1];
  return index.view(spread).expand_as(all).gather(dim + 1, at).squeeze(dim + 1);
}

/// The maximum over each window along `dim`, and its index.
void maximum_of_windows(
    Tensor& values,
    Tensor& indices,
    int64_t dim,
    const WeightedRows& windows) {
  Tensor rows;
  // What a transform wraps has no memory of its own.
  if (values.is_cpu() && values.has_storage() && !has_no_values(values)) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf,
        at::kBFloat16,
        values.scalar_type(),
        "adaptive_max_pool",
        [&] { rows = rows_of_maxima<scalar_t>(values, dim, windows); });
  } else {
    rows = rows_of_maxima_by_operators(values, dim, windows);
  }
  values = values.gather(dim, rows);
  indices = indices.gather(dim, rows);
}

/// Each element's global flat index within the stencil's dims.
Tensor own_indices(const Tensor& x, const StencilCall& call) {
  const auto sizes = x.sizes().slice(call.first_dim());
  const auto own =
      at::arange(c10::multiply_integers(sizes), x.options().dtype(at::kLong));
  return global_indices(own, call).view(sizes).expand(x.sizes());
}

/// Values, and global flat indices.
Pair local_maximum(const AdaptivePlan& plan, const Tensor& rows) {
  if (plan.calls_plain) {
    auto [values, indices] = plain_maximum(rows, plan.size);
    return {values, global_indices(indices, plan.call)};
  }
  const int64_t first = plan.call.first_dim();
  Tensor values = rows;
  Tensor indices = own_indices(rows, plan.call);
  for (size_t i = plan.windows.size(); i-- > 0;) {
    maximum_of_windows(
        values, indices, first + static_cast<int64_t>(i), *plan.windows[i]);
  }
  return {values, indices};
}

Pair maximum(const Adaptive& pool, const Tensor& x) {
  const auto plan = find_plan(pool, x, [&](const Tensor& t) {
    return std::get<0>(plain_maximum(t, pool.size));
  });
  return run_stencil_with_indices(x, plan->call, [&](const Tensor& rows) {
    return local_maximum(*plan, rows);
  });
}

// ---- the operators ----------------------------------------------------------

template <class Op, int64_t dims>
Tensor adaptive_avg_pool_function(const Tensor& input, IntArrayRef size) {
  const Tensor x = autocast_to_float(Op::name, input);
  const auto sizes = expanded(size, dims);
  if ((x.dim() == dims + 1 || x.dim() == dims + 2) &&
      sizes == std::vector<int64_t>(dims, 1)) {
    // A mean, as in PyTorch, which takes windows without rows, and complex
    // numbers, only so.
    std::vector<int64_t> last(dims);
    std::iota(last.begin(), last.end(), -dims);
    const auto mean = x.mean(last, /*keepdim=*/true);
    const auto layout = without_partial(spec(mean));
    return from_local(
        to_local(redistribute(mean, layout)),
        layout,
        x.suggest_memory_format());
  }
  return averaged({Op::name, dims, sizes, false}, x);
}

template <class Op, int64_t dims>
Pair adaptive_max_pool_function(const Tensor& x, IntArrayRef size) {
  const auto sizes = expanded(size, dims);
  return maximum({Op::name, dims, sizes, true}, autocast_to_float(Op::name, x));
}

namespace ops = at::_ops;

template <class Op, int64_t dims>
constexpr auto adaptive_avg_pool =
    function_rule<Op, adaptive_avg_pool_function<Op, dims>>;
template <class Op, int64_t dims>
constexpr auto adaptive_max_pool =
    function_rule<Op, adaptive_max_pool_function<Op, dims>>;

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("adaptive_avg_pool1d", adaptive_avg_pool<ops::adaptive_avg_pool1d, 1>);
  m.impl("adaptive_avg_pool2d", adaptive_avg_pool<ops::adaptive_avg_pool2d, 2>);
  m.impl("adaptive_avg_pool3d", adaptive_avg_pool<ops::adaptive_avg_pool3d, 3>);
  m.impl(
      "_adaptive_avg_pool2d", adaptive_avg_pool<ops::_adaptive_avg_pool2d, 2>);
  m.impl(
      "_adaptive_avg_pool3d", adaptive_avg_pool<ops::_adaptive_avg_pool3d, 3>);
  m.impl("adaptive_max_pool1d", adaptive_max_pool<ops::adaptive_max_pool1d, 1>);
  m.impl("adaptive_max_pool2d", adaptive_max_pool<ops::adaptive_max_pool2d, 2>);
  m.impl("adaptive_max_pool3d", adaptive_max_pool<ops::adaptive_max_pool3d, 3>);
}

} // namespace shardtensor::detail
