#include "shardtensor/comm/collectives_v.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "shardtensor/comm/exchange.h"
#include "shardtensor/comm/exchange_code.h"
#include "shardtensor/comm/group.h"

namespace shardtensor {

using namespace detail;

namespace {

/// The extents of one piece per rank must be that many, and not negative.
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

void check_rank(
    const char* op,
    const char* name,
    int64_t rank,
    const Group& group) {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < group.ranks(),
      op,
      ": ",
      name,
      " is ",
      rank,
      ", expected one of the ",
      group.ranks(),
      " ranks of group '",
      group.name(),
      "'");
}

int64_t sum(c10::IntArrayRef splits) {
  return std::accumulate(splits.begin(), splits.end(), int64_t{0});
}

/// The piece [begin, begin + extent) of dim, whole in the other dims.
Box rows(c10::IntArrayRef sizes, int64_t dim, int64_t begin, int64_t extent) {
  return box_of_rows(sizes, dim, begin, begin + extent);
}

std::vector<int64_t> with_extent(
    c10::IntArrayRef sizes,
    int64_t dim,
    int64_t extent) {
  std::vector<int64_t> result = sizes.vec();
  result[dim] = extent;
  return result;
}

/// An exchange in which this rank sends sends[r] to and receives receives[r]
/// from each rank r.
EncodedExchange encode_between(
    std::vector<int64_t> source_sizes,
    const std::vector<Box>& sends,
    const std::vector<Box>& receives,
    std::vector<int64_t> target_sizes,
    int64_t largest_message,
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

/// One piece per rank, side by side along dim, and the elements of the largest.
std::pair<std::vector<Box>, int64_t> pieces(
    c10::IntArrayRef sizes,
    int64_t dim,
    c10::IntArrayRef extents) {
  std::vector<Box> boxes;
  int64_t begin = 0;
  int64_t largest = 0;
  for (const auto extent : extents) {
    boxes.push_back(rows(sizes, dim, begin, extent));
    begin += extent;
    largest = std::max(largest, numel(boxes.back()));
  }
  return {std::move(boxes), largest};
}

/// Every rank's piece, of which `extents` are the extents along dim, to every
/// rank. `sizes` are those of any piece in the other dims.
EncodedExchange encode_all_gather(
    c10::IntArrayRef sizes,
    int64_t dim,
    c10::IntArrayRef extents,
    const Group& group) {
  const auto own = with_extent(sizes, dim, extents[group.rank()]);
  const std::vector<Box> sends(group.ranks(), rows(own, dim, 0, own[dim]));
  const auto [receives, largest] = pieces(sizes, dim, extents);
  return encode_between(
      own,
      sends,
      receives,
      with_extent(sizes, dim, sum(extents)),
      largest,
      group);
}

/// Every rank's piece to the rank dst, which puts them side by side.
EncodedExchange encode_gather(
    c10::IntArrayRef sizes,
    int64_t dim,
    c10::IntArrayRef extents,
    int64_t dst,
    const Group& group) {
  const auto own = with_extent(sizes, dim, extents[group.rank()]);
  const auto whole = with_extent(sizes, dim, sum(extents));
  auto [receives, largest] = pieces(sizes, dim, extents);
  if (group.rank() != dst) {
    receives.assign(group.ranks(), rows(whole, dim, 0, 0));
  }
  std::vector<Box> sends(group.ranks(), rows(own, dim, 0, 0));
  sends[dst] = rows(own, dim, 0, own[dim]);
  return encode_between(own, sends, receives, whole, largest, group);
}

// Note [Sums of 16-bit numbers]
// An exchange adds what arrives in the tensor's own dtype, one rank after the
// other; fp16 and bf16 would lose small terms. Where a sum over ranks is made
// of them, in forward or backward, the terms arrive side by side instead and
// ATen adds them, in fp32. As many bytes travel.
bool adds_in_fp32(const at::Tensor& x) {
  return x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16;
}

bool backward_adds_in_fp32(const at::Tensor& x) {
  return at::GradMode::is_enabled() && adds_in_fp32(x);
}

/// `count` times x, side by side along dim.
at::Tensor copies(const at::Tensor& x, int64_t dim, int64_t count) {
  auto sizes = x.sizes().vec();
  sizes.insert(sizes.begin() + dim, count);
  return x.unsqueeze(dim).expand(sizes).flatten(dim, dim + 1);
}

} // namespace

at::Tensor all_gather_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group_name) {
  const Group group(group_name);
  dim = c10::maybe_wrap_dim(dim, x.dim());
  check_splits("all_gather_v", "sizes", sizes, group);
  const int64_t own = sizes[group.rank()];
  check_extent("all_gather_v", x, dim, own);
  if (backward_adds_in_fp32(x)) {
    const std::vector<int64_t> in_splits(group.ranks(), own);
    return all_to_all_v(
        copies(x, dim, group.ranks()), dim, in_splits, sizes, group_name);
  }
  return exchange(x, encode_all_gather(x.sizes(), dim, sizes, group));
}

at::Tensor reduce_scatter_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group_name) {
  const Group group(group_name);
  dim = c10::maybe_wrap_dim(dim, x.dim());
  check_splits("reduce_scatter_v", "sizes", sizes, group);
  check_extent("reduce_scatter_v", x, dim, sum(sizes));
  if (adds_in_fp32(x)) {
    const int64_t own = sizes[group.rank()];
    const std::vector<int64_t> out_splits(group.ranks(), own);
    return all_to_all_v(x, dim, sizes, out_splits, group_name)
        .unflatten(dim, {group.ranks(), own})
        .sum(dim);
  }
  return exchange(x, adjoint(encode_all_gather(x.sizes(), dim, sizes, group)));
}

at::Tensor all_to_all_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef in_splits,
    c10::IntArrayRef out_splits,
    const std::string& group_name) {
  const Group group(group_name);
  dim = c10::maybe_wrap_dim(dim, x.dim());
  check_splits("all_to_all_v", "in_splits", in_splits, group);
  check_splits("all_to_all_v", "out_splits", out_splits, group);
  check_extent("all_to_all_v", x, dim, sum(in_splits));
  TORCH_CHECK_VALUE(
      in_splits[group.rank()] == out_splits[group.rank()],
      "all_to_all_v: rank ",
      group.rank(),
      " keeps ",
      in_splits[group.rank()],
      " rows by in_splits, ",
      out_splits[group.rank()],
      " by out_splits, expected as many");
  std::vector<Box> sends;
  std::vector<Box> receives;
  int64_t in_begin = 0;
  int64_t out_begin = 0;
  for (int64_t rank = 0; rank < group.ranks(); ++rank) {
    sends.push_back(rows(x.sizes(), dim, in_begin, in_splits[rank]));
    receives.push_back(rows(x.sizes(), dim, out_begin, out_splits[rank]));
    in_begin += in_splits[rank];
    out_begin += out_splits[rank];
  }
  // No rank knows the other ranks' splits: one round, whatever the size.
  const auto encoded = encode_between(
      x.sizes().vec(),
      sends,
      receives,
      with_extent(x.sizes(), dim, out_begin),
      /*largest_message=*/1,
      group);
  return exchange(x, encoded);
}

at::Tensor gather_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    int64_t dst,
    const std::string& group_name) {
  const Group group(group_name);
  dim = c10::maybe_wrap_dim(dim, x.dim());
  check_rank("gather_v", "dst", dst, group);
  check_splits("gather_v", "sizes", sizes, group);
  check_extent("gather_v", x, dim, sizes[group.rank()]);
  return exchange(x, encode_gather(x.sizes(), dim, sizes, dst, group));
}

at::Tensor scatter_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    int64_t src,
    const std::string& group_name) {
  const Group group(group_name);
  dim = c10::maybe_wrap_dim(dim, x.dim());
  check_rank("scatter_v", "src", src, group);
  check_splits("scatter_v", "sizes", sizes, group);
  auto [sends, largest] = pieces(x.sizes(), dim, sizes);
  if (group.rank() == src) {
    check_extent("scatter_v", x, dim, sum(sizes));
  } else {
    sends.assign(group.ranks(), rows(x.sizes(), dim, 0, 0));
  }
  const auto own = with_extent(x.sizes(), dim, sizes[group.rank()]);
  std::vector<Box> receives(group.ranks(), rows(own, dim, 0, 0));
  receives[src] = rows(own, dim, 0, own[dim]);
  return exchange(
      x, encode_between(x.sizes().vec(), sends, receives, own, largest, group));
}

at::Tensor indexed_all_to_all_v(
    const at::Tensor& x,
    int64_t dim,
    at::TensorList indices,
    c10::IntArrayRef out_splits,
    const std::string& group_name) {
  const Group group(group_name);
  dim = c10::maybe_wrap_dim(dim, x.dim());
  std::vector<int64_t> in_splits;
  for (const auto& index : indices) {
    in_splits.push_back(index.sym_numel().guard_int(__FILE__, __LINE__));
  }
  check_splits(
      "indexed_all_to_all_v", "the extents of indices", in_splits, group);
  const auto rows = at::cat(indices).to(at::kLong);
  const bool wide = backward_adds_in_fp32(x);
  const auto sent = wide
      ? x.to(at::kFloat).index_select(dim, rows).to(x.scalar_type())
      : x.index_select(dim, rows);
  return all_to_all_v(sent, dim, in_splits, out_splits, group_name);
}

at::Tensor broadcast(
    const at::Tensor& x,
    int64_t src,
    const std::string& group_name) {
  const Group group(group_name);
  check_rank("broadcast", "src", src, group);
  const auto row = x.unsqueeze(0);
  if (backward_adds_in_fp32(x)) {
    const std::vector<int64_t> one_each(group.ranks(), 1);
    return scatter_v(
               copies(row, 0, group.ranks()), 0, one_each, src, group_name)
        .squeeze(0);
  }
  const auto all = whole_box(row.sizes());
  const auto none = rows(row.sizes(), 0, 0, 0);
  const std::vector<Box> sends(group.ranks(), group.rank() == src ? all : none);
  std::vector<Box> receives(group.ranks(), none);
  receives[src] = all;
  const auto sizes = row.sizes().vec();
  return exchange(
             row,
             encode_between(sizes, sends, receives, sizes, numel(all), group))
      .squeeze(0);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("all_gather_v", all_gather_v);
  m.impl("reduce_scatter_v", reduce_scatter_v);
  m.impl("all_to_all_v", all_to_all_v);
  m.impl("gather_v", gather_v);
  m.impl("scatter_v", scatter_v);
  m.impl("indexed_all_to_all_v", indexed_all_to_all_v);
  m.impl("broadcast", shardtensor::broadcast);
}

} // namespace shardtensor
