#include <numeric>

#include <ATen/WrapDimUtils.h>

#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/nominal_strides.h"

// Unique rows of a dim are found on gathered tensors. PyTorch has that dim
// outermost then, which shows in how its results lie.

namespace shardtensor::detail {
namespace {

/// None for what is said about the rows.
std::vector<int64_t> unique_strides(
    const Call& call,
    const std::vector<int64_t>& sizes) {
  const auto dims = call.operand(0).dim();
  if (call.argument("dim").isNone() ||
      static_cast<int64_t>(sizes.size()) != dims) {
    return {};
  }
  std::vector<int64_t> order(dims);
  std::iota(order.rbegin(), order.rend(), 0);
  const auto dim = at::maybe_wrap_dim(call.argument("dim").toInt(), dims);
  order.erase(order.end() - 1 - dim);
  order.push_back(dim);
  return dense_strides(order, sizes);
}

Decision unique_rule(Call& call) {
  auto decision = replicate_rule(call);
  decision.is_repair = true;
  decision.strides_of = unique_strides;
  return decision;
}

const RegisterRules unique_rows{
    unique_rule,
    {
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::unique_dim_consecutive",
    }};

} // namespace
} // namespace shardtensor::detail
