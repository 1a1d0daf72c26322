#include "shardtensor/collectives/exchange_rows.h"

#include <algorithm>
#include <numeric>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <c10/core/WrapDimMinimal.h>

#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/comm/primitives/exchange_code.h"

namespace shardtensor::detail {

int64_t sum(c10::IntArrayRef splits) {
  return std::accumulate(splits.begin(), splits.end(), int64_t{0});
}

std::vector<int64_t> with_extent(
    c10::IntArrayRef sizes,
    int64_t dim,
    int64_t extent) {
  std::vector<int64_t> result = sizes.vec();
  result[dim] = extent;
  return result;
}

std::string text_of_rows(const char* op, const at::Tensor& x, int64_t dim) {
  std::string sizes;
  for (int64_t i = 0; i < x.dim(); ++i) {
    sizes += i == 0 ? "" : ", ";
    sizes += i == dim ? "*" : std::to_string(x.size(i));
  }
  return c10::str(
      op, " of ", x.scalar_type(), " tensors [", sizes, "] along dim ", dim);
}

std::pair<std::vector<Box>, int64_t> pieces(
    c10::IntArrayRef sizes,
    int64_t dim,
    c10::IntArrayRef extents) {
  std::vector<Box> boxes;
  int64_t begin = 0;
  int64_t largest = 0;
  for (const auto extent : extents) {
    boxes.push_back(box_of_rows(sizes, dim, begin, begin + extent));
    begin += extent;
    largest = std::max(largest, numel(boxes.back()));
  }
  return {std::move(boxes), largest};
}

EncodedExchange encode_between(
    std::vector<int64_t> source_sizes,
    const std::vector<Box>& sends,
    const std::vector<Box>& receives,
    std::vector<int64_t> target_sizes,
    std::optional<int64_t> largest_message,
    const Group& group) {
  ExchangePlan plan;
  plan.source_sizes = std::move(source_sizes);
  plan.target_sizes = std::move(target_sizes);
  plan.largest_message = largest_message;
  for (int64_t rank = 0; rank < group.ranks(); ++rank) {
    plan.sends.push_back({group.rank(), rank, sends[rank], sends[rank]});
    plan.receives.push_back(
        {rank, group.rank(), receives[rank], receives[rank]});
  }
  return encode(std::move(plan), group);
}

EncodedExchange encode_all_gather(
    c10::IntArrayRef sizes,
    int64_t dim,
    c10::IntArrayRef extents,
    const Group& group) {
  const auto own = with_extent(sizes, dim, extents[group.rank()]);
  const std::vector<Box> sends(group.ranks(), whole_box(own));
  const auto [receives, largest] = pieces(sizes, dim, extents);
  return encode_between(
      own,
      sends,
      receives,
      with_extent(sizes, dim, sum(extents)),
      largest,
      group);
}

bool adds_in_fp32(const at::Tensor& x) {
  return x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
}

bool backward_adds_in_fp32(const at::Tensor& x) {
  return at::GradMode::is_enabled() && adds_in_fp32(x);
}

at::Tensor copies(const at::Tensor& x, int64_t dim, int64_t count) {
  auto sizes = x.sizes().vec();
  sizes.insert(sizes.begin() + dim, count);
  return x.unsqueeze(dim).expand(sizes).flatten(dim, dim + 1);
}

at::Tensor all_gather_rows(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group_name) {
  const Group group(group_name);
  dim = c10::maybe_wrap_dim(dim, x.dim());
  if (backward_adds_in_fp32(x)) {
    const std::vector<int64_t> in_splits(group.ranks(), sizes[group.rank()]);
    return all_to_all_rows(
        copies(x, dim, group.ranks()), dim, in_splits, sizes, group_name);
  }
  return exchange(x, encode_all_gather(x.sizes(), dim, sizes, group));
}

std::vector<int64_t> gather_number(int64_t own, const std::string& group_name) {
  const Group group(group_name);
  const std::vector<int64_t> one(group.ranks(), 1);
  const auto options =
      at::TensorOptions(at::kLong).device(group.device_of_numbers());
  return host_numbers(
      all_gather_rows(at::full({1}, own, options), 0, one, group_name));
}

at::Tensor reduce_numbers(
    const at::Tensor& own,
    Reduce reduce,
    const std::string& group_name) {
  const auto device = Group(group_name).device_of_numbers();
  return all_reduce(own.to(device), reduce, group_name).cpu();
}

at::Tensor all_to_all_rows(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef in_splits,
    c10::IntArrayRef out_splits,
    const std::string& group_name) {
  const Group group(group_name);
  dim = c10::maybe_wrap_dim(dim, x.dim());
  const auto encoded = encode_between(
      x.sizes().vec(),
      pieces(x.sizes(), dim, in_splits).first,
      pieces(x.sizes(), dim, out_splits).first,
      with_extent(x.sizes(), dim, sum(out_splits)),
      /*largest_message=*/std::nullopt, // nobody knows the others' splits
      group);
  return exchange(x, encoded);
}

} // namespace shardtensor::detail
