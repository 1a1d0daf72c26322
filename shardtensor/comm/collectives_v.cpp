#include "shardtensor/comm/collectives_v.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "shardtensor/comm/exchange.h"
#include "shardtensor/comm/exchange_code.h"
#include "shardtensor/comm/group.h"

namespace shardtensor {

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

int64_t sum(c10::IntArrayRef splits) {
  return std::accumulate(splits.begin(), splits.end(), int64_t{0});
}

/// The piece [begin, begin + extent) of dim, whole in the other dims.
Box rows(c10::IntArrayRef sizes, int64_t dim, int64_t begin, int64_t extent) {
  Box box;
  for (const auto size : sizes) {
    box.push_back({0, size});
  }
  box[dim] = {begin, begin + extent};
  return box;
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
at::Tensor run(
    const at::Tensor& x,
    const std::vector<Box>& sends,
    const std::vector<Box>& receives,
    std::vector<int64_t> target_sizes,
    int64_t largest_message,
    const Group& group) {
  std::vector<int64_t> ranks(group.ranks());
  std::iota(ranks.begin(), ranks.end(), 0);
  ExchangePlan plan;
  plan.source_sizes = x.sizes().vec();
  plan.target_sizes = std::move(target_sizes);
  plan.largest_message = group.ranks() > 1 ? largest_message : 0;
  for (const auto rank : ranks) {
    plan.sends.push_back({group.rank(), rank, sends[rank], sends[rank]});
    plan.receives.push_back(
        {rank, group.rank(), receives[rank], receives[rank]});
  }
  return exchange(x, {encode(plan, group.rank(), ranks), group.name()});
}

/// Elements of the largest piece, of which `sizes` are the extents along dim.
int64_t largest_piece(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes) {
  const auto largest = *std::max_element(sizes.begin(), sizes.end());
  const auto piece = with_extent(x.sizes(), dim, largest);
  return std::accumulate(
      piece.begin(), piece.end(), int64_t{1}, std::multiplies<>());
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
  check_extent("all_gather_v", x, dim, sizes[group.rank()]);
  const std::vector<Box> sends(
      group.ranks(), rows(x.sizes(), dim, 0, x.size(dim)));
  std::vector<Box> receives;
  int64_t begin = 0;
  for (const auto extent : sizes) {
    receives.push_back(rows(x.sizes(), dim, begin, extent));
    begin += extent;
  }
  return run(
      x,
      sends,
      receives,
      with_extent(x.sizes(), dim, begin),
      largest_piece(x, dim, sizes),
      group);
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
  const auto own = sizes[group.rank()];
  std::vector<Box> sends;
  int64_t begin = 0;
  for (const auto extent : sizes) {
    sends.push_back(rows(x.sizes(), dim, begin, extent));
    begin += extent;
  }
  const std::vector<Box> receives(group.ranks(), rows(x.sizes(), dim, 0, own));
  return run(
      x,
      sends,
      receives,
      with_extent(x.sizes(), dim, own),
      largest_piece(x, dim, sizes),
      group);
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
  return run(
      x,
      sends,
      receives,
      with_extent(x.sizes(), dim, out_begin),
      /*largest_message=*/1,
      group);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("all_gather_v", all_gather_v);
  m.impl("reduce_scatter_v", reduce_scatter_v);
  m.impl("all_to_all_v", all_to_all_v);
}

} // namespace shardtensor
