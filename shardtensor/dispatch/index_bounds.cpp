#include "shardtensor/dispatch/index_bounds.h"

#include <limits>
#include <optional>
#include <utility>

#include <ATen/ops/aminmax.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/tensor/shown_elements.h"

namespace shardtensor::detail {
namespace {

struct Bounds {
  int64_t low;
  int64_t high;
};

/// The lowest index times -1, and the highest.
at::Tensor extremes_of(const at::Tensor& index) {
  if (index.numel() == 0) {
    return at::full(
        {2},
        std::numeric_limits<int64_t>::min(),
        index.options().dtype(at::kLong));
  }
  const auto [low, high] = at::aminmax(index.to(at::kLong));
  return at::stack({low.neg(), high});
}

Bounds to_bounds(const at::Tensor& extremes) {
  const auto numbers = host_numbers(extremes);
  return {-numbers[0], numbers[1]};
}

/// Communication: one all-reduce, for an index that is not known.
Bounds bounds_on_all_ranks(const std::string& op, const at::Tensor& index) {
  const auto own = local_of(index);
  const auto axes = own.spec->sharded_axes();
  if (axes.empty()) {
    return to_bounds(extremes_of(own.tensor));
  }
  // A step meets an index in forward and again in backward.
  static auto& known = *new KnownOfShown<Bounds, 8>();
  auto shown = shown_elements(index);
  if (const auto found = known.find(shown)) {
    return *found;
  }
  const CommScope scope(op.c_str());
  const auto bounds = to_bounds(all_reduce(
      extremes_of(own.tensor), Reduce::Max, *own.spec->mesh(), axes));
  known.add(std::move(shown), bounds);
  return bounds;
}

bool has_values(const at::Tensor& index) {
  return index.numel() > 0 &&
      at::isIntegralType(index.scalar_type(), /*includeBool=*/false) &&
      !is_traced(is_shard_tensor(index) ? impl_of(index)->local() : index);
}

std::string out_of_bounds(
    const std::string& op,
    int64_t index,
    int64_t dim,
    int64_t extent) {
  return c10::str(
      op,
      ": index ",
      index,
      " is out of bounds for dimension ",
      dim,
      " with size ",
      extent);
}

} // namespace

std::optional<int64_t> find_outside(
    const std::string& op,
    const at::Tensor& index,
    int64_t lowest,
    int64_t extent) {
  if (!has_values(index)) {
    return std::nullopt;
  }
  const auto [low, high] = is_shard_tensor(index)
      ? bounds_on_all_ranks(op, index)
      : to_bounds(extremes_of(index));
  if (low >= lowest && high < extent) {
    return std::nullopt;
  }
  return low < lowest ? low : high;
}

void check_planned_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent,
    bool may_be_negative) {
  const auto outside =
      find_outside(op, index, may_be_negative ? -extent : 0, extent);
  TORCH_CHECK_INDEX(!outside, out_of_bounds(op, *outside, dim, extent));
}

void check_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent,
    bool may_be_negative) {
  if (index.is_cpu()) {
    check_planned_index(op, index, dim, extent, may_be_negative);
  }
}

void check_gather_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent) {
  if (index.is_cpu()) {
    const auto outside = find_outside(op, index, 0, extent);
    TORCH_CHECK(!outside, out_of_bounds(op, *outside, dim, extent));
  }
}

} // namespace shardtensor::detail
