#include "shardtensor/dispatch/index_bounds.h"

#include <limits>

#include <ATen/ops/aminmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/dispatch/kernel.h"

namespace shardtensor::detail {
namespace {

/// The lowest index times -1, and the highest.
at::Tensor bounds_of(const at::Tensor& index) {
  if (index.numel() == 0) {
    return at::full({2}, std::numeric_limits<int64_t>::min(), at::kLong);
  }
  const auto [low, high] = at::aminmax(index.to(at::kLong));
  return at::stack({low.neg(), high});
}

at::Tensor bounds_on_all_ranks(const std::string& op, const at::Tensor& index) {
  const CommScope scope(op.c_str());
  const auto own = local_of(index);
  const auto axes = own.spec->sharded_axes();
  const auto bounds = bounds_of(own.tensor);
  return axes.empty()
      ? bounds
      : all_reduce(bounds, Reduce::Max, *own.spec->mesh(), axes);
}

bool has_values(const at::Tensor& index) {
  return index.is_cpu() && index.numel() > 0 &&
      !is_traced(is_shard_tensor(index) ? impl_of(index)->local() : index);
}

} // namespace

void check_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent,
    bool may_be_negative) {
  if (!has_values(index) ||
      !at::isIntegralType(index.scalar_type(), /*includeBool=*/false)) {
    return;
  }
  const auto bounds = is_shard_tensor(index) ? bounds_on_all_ranks(op, index)
                                             : bounds_of(index);
  const auto low = -bounds[0].item<int64_t>();
  const auto high = bounds[1].item<int64_t>();
  const auto lowest = may_be_negative ? -extent : 0;
  TORCH_CHECK_INDEX(
      low >= lowest && high < extent,
      op,
      ": index ",
      low < lowest ? low : high,
      " is out of bounds for dimension ",
      dim,
      " with size ",
      extent);
}

} // namespace shardtensor::detail
