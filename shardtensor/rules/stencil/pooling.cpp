// Pooling with a fixed window, at the function level. The local operator is
// called with the arguments of the global one, on the rows that the owned
// outputs read (Stencil::pool).
#include <ATen/core/Tensor.h>
#include <ATen/ops/avg_pool1d_ops.h>
#include <ATen/ops/avg_pool2d_ops.h>
#include <ATen/ops/avg_pool3d_ops.h>
#include <ATen/ops/max_pool1d_ops.h>
#include <ATen/ops/max_pool1d_with_indices_ops.h>
#include <ATen/ops/max_pool2d_ops.h>
#include <ATen/ops/max_pool2d_with_indices_ops.h>
#include <ATen/ops/max_pool3d_ops.h>
#include <ATen/ops/max_pool3d_with_indices_ops.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/stencil/global_indices.h"
#include "shardtensor/rules/stencil/run_stencil.h"

namespace shardtensor::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;

/// The window of any pooling over `dims` dims, as the user gave it.
struct Pool {
  const char* op;
  int64_t dims;
  IntArrayRef kernel;
  IntArrayRef stride; // empty: the kernel
  IntArrayRef padding;
  IntArrayRef dilation;
  bool ceil_mode;
};

using PlainPool = std::function<Tensor(const Tensor&)>;

StencilCall plan_pool(
    const Pool& pool,
    const Tensor& x,
    const PlainPool& plain) {
  const auto sizes = infer_sizes(pool.op, x, pool.dims, plain);
  const auto n = static_cast<size_t>(pool.dims);
  const auto kernel = expanded(pool.kernel, n);
  const auto stride = pool.stride.empty() ? kernel : expanded(pool.stride, n);
  const auto padding = expanded(pool.padding, n);
  const auto dilation = expanded(pool.dilation, n);
  const int64_t first = x.dim() - pool.dims;
  std::vector<Stencil> stencils;
  for (size_t i = 0; i < n; ++i) {
    const auto dim = first + static_cast<int64_t>(i);
    stencils.push_back(
        Stencil::pool(
            {kernel[i], stride[i], padding[i], dilation[i]},
            x.size(dim),
            sizes[dim]));
  }
  return plan_stencil_call(spec(x), {}, stencils, padding, sizes);
}

std::shared_ptr<const StencilCall> find_plan(
    const Pool& pool,
    const Tensor& x,
    const PlainPool& plain) {
  static PlanCache<StencilCall> plans;
  PlanKey key;
  key.add(spec(x))
      .add(pool.dims)
      .add(pool.kernel)
      .add(pool.stride)
      .add(pool.padding)
      .add(pool.dilation)
      .add(static_cast<int64_t>(pool.ceil_mode));
  return plans.find(key, [&] { return plan_pool(pool, x, plain); });
}

Tensor pooled(
    const Pool& pool,
    const Tensor& input,
    at::MemoryFormat format,
    const PlainPool& plain) {
  const Tensor x = autocast_to_float(pool.op, input);
  return run_stencil(x, *find_plan(pool, x, plain), format, plain);
}

using Pair = std::tuple<Tensor, Tensor>;

Pair pooled_with_indices(
    const Pool& pool,
    const Tensor& x,
    const std::function<Pair(const Tensor&)>& plain) {
  const auto call = find_plan(
      pool, x, [&](const Tensor& t) { return std::get<0>(plain(t)); });
  return run_stencil_with_indices(x, *call, [&](const Tensor& rows) {
    auto [values, indices] = plain(rows);
    return Pair(values, global_indices(indices, *call));
  });
}

// ---- the operators ----------------------------------------------------------

template <class Op, int64_t dims>
Tensor max_pool_function(
    const Tensor& x,
    IntArrayRef kernel,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool ceil_mode) {
  return pooled(
      {Op::name, dims, kernel, stride, padding, dilation, ceil_mode},
      x,
      x.suggest_memory_format(),
      [&](const Tensor& rows) {
        return Op::call(rows, kernel, stride, padding, dilation, ceil_mode);
      });
}

template <class Op, int64_t dims>
Pair max_pool_with_indices_function(
    const Tensor& x,
    IntArrayRef kernel,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool ceil_mode) {
  return pooled_with_indices(
      {Op::name, dims, kernel, stride, padding, dilation, ceil_mode},
      x,
      [&](const Tensor& rows) {
        return Op::call(rows, kernel, stride, padding, dilation, ceil_mode);
      });
}

/// In one dim there is no divisor.
template <class Op, int64_t dims, class... Divisor>
Tensor avg_pool_function(
    const Tensor& x,
    IntArrayRef kernel,
    IntArrayRef stride,
    IntArrayRef padding,
    bool ceil_mode,
    bool count_padding,
    Divisor... divisor) {
  static constexpr int64_t no_dilation[] = {1};
  return pooled(
      {Op::name, dims, kernel, stride, padding, no_dilation, ceil_mode},
      x,
      dims == 3 ? at::MemoryFormat::Contiguous : x.suggest_memory_format(),
      [&](const Tensor& rows) {
        return Op::call(
            rows,
            kernel,
            stride,
            padding,
            ceil_mode,
            count_padding,
            divisor...);
      });
}

namespace ops = at::_ops;

template <class Op, int64_t dims>
constexpr auto max_pool = function_rule<Op, max_pool_function<Op, dims>>;
template <class Op, int64_t dims>
constexpr auto max_pool_with_indices =
    function_rule<Op, max_pool_with_indices_function<Op, dims>>;
template <class Op, int64_t dims, class... Divisor>
constexpr auto avg_pool =
    function_rule<Op, avg_pool_function<Op, dims, Divisor...>>;
using Divisor = std::optional<int64_t>;

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("max_pool1d", max_pool<ops::max_pool1d, 1>);
  m.impl("max_pool2d", max_pool<ops::max_pool2d, 2>);
  m.impl("max_pool3d", max_pool<ops::max_pool3d, 3>);
  m.impl(
      "max_pool1d_with_indices",
      max_pool_with_indices<ops::max_pool1d_with_indices, 1>);
  m.impl(
      "max_pool2d_with_indices",
      max_pool_with_indices<ops::max_pool2d_with_indices, 2>);
  m.impl(
      "max_pool3d_with_indices",
      max_pool_with_indices<ops::max_pool3d_with_indices, 3>);
  m.impl("avg_pool1d", avg_pool<ops::avg_pool1d, 1>);
  m.impl("avg_pool2d", avg_pool<ops::avg_pool2d, 2, Divisor>);
  m.impl("avg_pool3d", avg_pool<ops::avg_pool3d, 3, Divisor>);
}

} // namespace shardtensor::detail
