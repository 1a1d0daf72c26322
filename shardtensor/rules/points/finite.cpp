#include "shardtensor/rules/points/finite.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/isfinite.h>

#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/comm/transforms.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

void check_none_failed(const char* op, const Tensor& failed) {
  TORCH_CHECK_VALUE(
      failed.item<int64_t>() == 0,
      op,
      ": expected finite coordinates, got NaN or infinite ones");
}

} // namespace

void check_finite(const char* op, const Tensor& given) {
  const OutsideTransforms of_all_levels;
  const auto points = values_inside(given).detach();
  const bool is_cut = is_shard_tensor(points);
  if (is_traced(is_cut ? to_local(points) : points)) {
    return;
  }
  const auto finite = at::isfinite(points).all();
  check_none_failed(
      op, (is_cut ? full_tensor(finite) : finite).logical_not().to(at::kInt));
}

void check_finite(
    const char* op,
    const Tensor& points,
    const Tensor& queries,
    const std::string& group) {
  const auto finite =
      at::isfinite(points).all().logical_and(at::isfinite(queries).all());
  auto failed = finite.logical_not().to(at::kInt);
  if (!group.empty()) {
    failed = all_reduce(failed, Reduce::Max, group);
  }
  check_none_failed(op, failed);
}

} // namespace shardtensor::detail
