// Pooling with a fixed window, at the function level. The local operator is
// called with the arguments of the global one, on the rows that the owned
// outputs read (Stencil::pool).
#include <ATen/ops/avg_pool1d.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/avg_pool3d.h>
#include <ATen/ops/max_pool1d.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/max_pool3d.h>
#include <ATen/ops/max_pool3d_with_indices.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/rules/stencil/global_indices.h"
#include "shardtensor/rules/stencil/run_stencil.h"

namespace shardtensor {
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

struct PoolPlan {
  StencilCall call;
};

PoolPlan plan_pool(const Pool& pool, const Tensor& x, const PlainPool& plain) {
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
  return {plan_stencil_call(spec(x), {}, stencils, padding, sizes)};
}

std::shared_ptr<const PoolPlan> find_plan(
    const Pool& pool,
    const Tensor& x,
    const PlainPool& plain) {
  static PlanCache<PoolPlan> plans;
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

Tensor pool_rule(const Pool& pool, const Tensor& x, const PlainPool& plain) {
  if (is_transformed({x})) {
    BelowFunctionLevel below;
    return plain(x);
  }
  CommScope scope(pool.op);
  const auto plan = find_plan(pool, x, plain);
  return run_stencil(x, plan->call, plain);
}

using Pair = std::tuple<Tensor, Tensor>;

Pair pool_with_indices_rule(
    const Pool& pool,
    const Tensor& x,
    const std::function<Pair(const Tensor&)>& plain) {
  if (is_transformed({x})) {
    BelowFunctionLevel below;
    return plain(x);
  }
  CommScope scope(pool.op);
  const auto plan = find_plan(
      pool, x, [&](const Tensor& t) { return std::get<0>(plain(t)); });
  return run_stencil_with_indices(x, plan->call, [&](const Tensor& rows) {
    auto [values, indices] = plain(rows);
    return Pair(values, global_indices(indices, plan->call));
  });
}

// ---- the operators ----------------------------------------------------------

#define SHARDTENSOR_MAX_POOL(N)                                    \
  Tensor max_pool##N##d_rule(                                      \
      const Tensor& x,                                             \
      IntArrayRef kernel,                                          \
      IntArrayRef stride,                                          \
      IntArrayRef padding,                                         \
      IntArrayRef dilation,                                        \
      bool ceil_mode) {                                            \
    return pool_rule(                                              \
        {"aten::max_pool" #N "d",                                  \
         N,                                                        \
         kernel,                                                   \
         stride,                                                   \
         padding,                                                  \
         dilation,                                                 \
         ceil_mode},                                               \
        x,                                                         \
        [&](const Tensor& rows) {                                  \
          return at::max_pool##N##d(                               \
              rows, kernel, stride, padding, dilation, ceil_mode); \
        });                                                        \
  }                                                                \
  Pair max_pool##N##d_with_indices_rule(                           \
      const Tensor& x,                                             \
      IntArrayRef kernel,                                          \
      IntArrayRef stride,                                          \
      IntArrayRef padding,                                         \
      IntArrayRef dilation,                                        \
      bool ceil_mode) {                                            \
    return pool_with_indices_rule(                                 \
        {"aten::max_pool" #N "d_with_indices",                     \
         N,                                                        \
         kernel,                                                   \
         stride,                                                   \
         padding,                                                  \
         dilation,                                                 \
         ceil_mode},                                               \
        x,                                                         \
        [&](const Tensor& rows) {                                  \
          return at::max_pool##N##d_with_indices(                  \
              rows, kernel, stride, padding, dilation, ceil_mode); \
        });                                                        \
  }

SHARDTENSOR_MAX_POOL(1)
SHARDTENSOR_MAX_POOL(2)
SHARDTENSOR_MAX_POOL(3)

const std::vector<int64_t> kNoDilation{1};

Tensor avg_pool1d_rule(
    const Tensor& x,
    IntArrayRef kernel,
    IntArrayRef stride,
    IntArrayRef padding,
    bool ceil_mode,
    bool count_padding) {
  return pool_rule(
      {"aten::avg_pool1d", 1, kernel, stride, padding, kNoDilation, ceil_mode},
      x,
      [&](const Tensor& rows) {
        return at::avg_pool1d(
            rows, kernel, stride, padding, ceil_mode, count_padding);
      });
}

#define SHARDTENSOR_AVG_POOL(N)         \
  Tensor avg_pool##N##d_rule(           \
      const Tensor& x,                  \
      IntArrayRef kernel,               \
      IntArrayRef stride,               \
      IntArrayRef padding,              \
      bool ceil_mode,                   \
      bool count_padding,               \
      std::optional<int64_t> divisor) { \
    return pool_rule(                   \
        {"aten::avg_pool" #N "d",       \
         N,                             \
         kernel,                        \
         stride,                        \
         padding,                       \
         kNoDilation,                   \
         ceil_mode},                    \
        x,                              \
        [&](const Tensor& rows) {       \
          return at::avg_pool##N##d(    \
              rows,                     \
              kernel,                   \
              stride,                   \
              padding,                  \
              ceil_mode,                \
              count_padding,            \
              divisor);                 \
        });                             \
  }

SHARDTENSOR_AVG_POOL(2)
SHARDTENSOR_AVG_POOL(3)

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("max_pool1d", max_pool1d_rule);
  m.impl("max_pool2d", max_pool2d_rule);
  m.impl("max_pool3d", max_pool3d_rule);
  m.impl("max_pool1d_with_indices", max_pool1d_with_indices_rule);
  m.impl("max_pool2d_with_indices", max_pool2d_with_indices_rule);
  m.impl("max_pool3d_with_indices", max_pool3d_with_indices_rule);
  m.impl("avg_pool1d", avg_pool1d_rule);
  m.impl("avg_pool2d", avg_pool2d_rule);
  m.impl("avg_pool3d", avg_pool3d_rule);
}

} // namespace shardtensor
