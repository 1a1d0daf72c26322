#include "shardtensor/collectives/check_rows.h"

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/host_numbers.h"

namespace shardtensor::detail {

void check_splits(
    const char* op,
    const char* name,
    c10::IntArrayRef splits,
    const Group& group) {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(splits.size()) == group.ranks(),
      op,
      ": ",
      name,
      " is ",
      splits,
      ", expected ",
      group.ranks(),
      " numbers, one for each rank of group '",
      group.name(),
      "'");
  TORCH_CHECK_VALUE(
      std::all_of(splits.begin(), splits.end(), [](auto n) { return n >= 0; }),
      op,
      ": ",
      name,
      " is ",
      splits,
      ", expected no negative number");
}

void check_extent(
    const char* op,
    const at::Tensor& x,
    int64_t dim,
    int64_t expected) {
  TORCH_CHECK_VALUE(
      x.size(dim) == expected,
      op,
      ": x has sizes ",
      x.sizes(),
      ", expected ",
      expected,
      " in dim ",
      dim);
}

void check_indices(
    const char* op,
    const at::Tensor& indices,
    const at::Tensor& x,
    int64_t dim) {
  if (indices.numel() == 0 || is_tracing(indices)) {
    return;
  }
  const auto [low, high] = at::aminmax(indices);
  const auto extremes = host_numbers(at::stack({low, high}));
  const auto extent = x.size(dim);
  TORCH_CHECK_INDEX(
      extremes[0] >= 0 && extremes[1] < extent,
      op,
      ": an index is ",
      extremes[0] < 0 ? extremes[0] : extremes[1],
      ", expected 0 or more and less than ",
      extent,
      ", the extent of dim ",
      dim);
}

Collective with_sizes(
    const char* op,
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes) {
  return {c10::str(text_of_rows(op, x, dim), ", sizes ", sizes), "", {}, {}};
}

} // namespace shardtensor::detail
