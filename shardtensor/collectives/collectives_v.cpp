#include "shardtensor/collectives/collectives_v.h"

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "shardtensor/collectives/check_rows.h"
#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/comm/primitives/exchange_code.h"

namespace shardtensor {

using namespace detail;

namespace {

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

// ---- what all ranks must tell alike -----------------------------------------

/// One for each rank that is not this one and gets something.
Splits splits_of(c10::IntArrayRef elements, const Group& group) {
  Splits splits;
  for (int64_t rank = 0; rank < group.ranks(); ++rank) {
    if (rank != group.rank() && elements[rank] != 0) {
      splits.push_back({rank, elements[rank]});
    }
  }
  return splits;
}

/// A call in which each rank has its own splits.
Collective with_splits(
    const char* op,
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef in_splits,
    c10::IntArrayRef out_splits,
    const Group& group) {
  check_splits(op, "out_splits", out_splits, group);
  TORCH_CHECK_VALUE(
      in_splits[group.rank()] == out_splits[group.rank()],
      op,
      ": rank ",
      group.rank(),
      " keeps ",
      in_splits[group.rank()],
      " rows by in_splits, ",
      out_splits[group.rank()],
      " by out_splits, expected as many");
  return {
      text_of_rows(op, x, dim),
      c10::str(", in_splits ", in_splits, ", out_splits ", out_splits),
      splits_of(in_splits, group),
      splits_of(out_splits, group)};
}

// ---- plans ------------------------------------------------------------------

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
    receives.assign(group.ranks(), box_of_rows(whole, dim, 0, 0));
  }
  std::vector<Box> sends(group.ranks(), box_of_rows(own, dim, 0, 0));
  sends[dst] = whole_box(own);
  return encode_between(own, sends, receives, whole, largest, group);
}

/// Pieces of the rank src's tensor, of which `extents` are the extents along
/// dim, to every rank. `sizes` are those of this rank's tensor.
EncodedExchange encode_scatter(
    c10::IntArrayRef sizes,
    int64_t dim,
    c10::IntArrayRef extents,
    int64_t src,
    const Group& group) {
  const auto own = with_extent(sizes, dim, extents[group.rank()]);
  auto [sends, largest] = pieces(sizes, dim, extents);
  if (group.rank() != src) {
    sends.assign(group.ranks(), box_of_rows(sizes, dim, 0, 0));
  }
  std::vector<Box> receives(group.ranks(), box_of_rows(own, dim, 0, 0));
  receives[src] = whole_box(own);
  return encode_between(sizes.vec(), sends, receives, own, largest, group);
}

} // namespace

at::Tensor all_gather_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group_name) {
  constexpr auto op = "all_gather_v";
  const Group group(group_name);
  agree_on_call(group, x, [&] {
    dim = c10::maybe_wrap_dim(dim, x.dim());
    check_splits(op, "sizes", sizes, group);
    check_extent(op, x, dim, sizes[group.rank()]);
    return with_sizes(op, x, dim, sizes);
  });
  return all_gather_rows(x, dim, sizes, group_name);
}

at::Tensor reduce_scatter_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group_name) {
  constexpr auto op = "reduce_scatter_v";
  const Group group(group_name);
  agree_on_call(group, x, [&] {
    dim = c10::maybe_wrap_dim(dim, x.dim());
    check_splits(op, "sizes", sizes, group);
    check_extent(op, x, dim, sum(sizes));
    return with_sizes(op, x, dim, sizes);
  });
  if (adds_in_fp32(x)) {
    const int64_t own = sizes[group.rank()];
    const std::vector<int64_t> out_splits(group.ranks(), own);
    return all_to_all_rows(x, dim, sizes, out_splits, group_name)
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
  constexpr auto op = "all_to_all_v";
  const Group group(group_name);
  agree_on_call(group, x, [&] {
    dim = c10::maybe_wrap_dim(dim, x.dim());
    check_splits(op, "in_splits", in_splits, group);
    check_extent(op, x, dim, sum(in_splits));
    return with_splits(op, x, dim, in_splits, out_splits, group);
  });
  return all_to_all_rows(x, dim, in_splits, out_splits, group_name);
}

at::Tensor gather_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    int64_t dst,
    const std::string& group_name) {
  constexpr auto op = "gather_v";
  const Group group(group_name);
  agree_on_call(group, x, [&] {
    dim = c10::maybe_wrap_dim(dim, x.dim());
    check_rank(op, "dst", dst, group);
    check_splits(op, "sizes", sizes, group);
    check_extent(op, x, dim, sizes[group.rank()]);
    auto call = with_sizes(op, x, dim, sizes);
    call.text += c10::str(", dst ", dst);
    return call;
  });
  return exchange(x, encode_gather(x.sizes(), dim, sizes, dst, group));
}

at::Tensor scatter_v(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    int64_t src,
    const std::string& group_name) {
  constexpr auto op = "scatter_v";
  const Group group(group_name);
  agree_on_call(group, x, [&] {
    dim = c10::maybe_wrap_dim(dim, x.dim());
    check_rank(op, "src", src, group);
    check_splits(op, "sizes", sizes, group);
    if (group.rank() == src) {
      check_extent(op, x, dim, sum(sizes));
    }
    auto call = with_sizes(op, x, dim, sizes);
    call.text += c10::str(", src ", src);
    return call;
  });
  return exchange(x, encode_scatter(x.sizes(), dim, sizes, src, group));
}

at::Tensor indexed_all_to_all_v(
    const at::Tensor& x,
    int64_t dim,
    at::TensorList indices,
    c10::IntArrayRef out_splits,
    const std::string& group_name) {
  constexpr auto op = "indexed_all_to_all_v";
  const Group group(group_name);
  std::vector<int64_t> in_splits;
  at::Tensor sent;
  agree_on_call(group, x, [&] {
    dim = c10::maybe_wrap_dim(dim, x.dim());
    for (const auto& index : indices) {
      in_splits.push_back(index.sym_numel().guard_int(__FILE__, __LINE__));
    }
    check_splits(op, "the extents of indices", in_splits, group);
    const auto rows = at::cat(indices).to(at::kLong);
    check_indices(op, rows, x, dim);
    const bool wide = backward_adds_in_fp32(x);
    sent = wide ? x.to(at::kFloat).index_select(dim, rows).to(x.scalar_type())
                : x.index_select(dim, rows);
    return with_splits(op, x, dim, in_splits, out_splits, group);
  });
  return all_to_all_rows(sent, dim, in_splits, out_splits, group_name);
}

at::Tensor broadcast(
    const at::Tensor& x,
    int64_t src,
    const std::string& group_name) {
  constexpr auto op = "broadcast";
  const Group group(group_name);
  agree_on_call(group, x, [&]() -> Collective {
    check_rank(op, "src", src, group);
    const auto text = c10::str(
        op, " of a ", x.scalar_type(), " tensor ", x.sizes(), ", src ", src);
    return {text, "", {}, {}};
  });
  const auto row = x.unsqueeze(0);
  if (backward_adds_in_fp32(x)) {
    const auto each = copies(row, 0, group.ranks());
    const std::vector<int64_t> one_each(group.ranks(), 1);
    const auto plan = encode_scatter(each.sizes(), 0, one_each, src, group);
    return exchange(each, plan).squeeze(0);
  }
  const auto sizes = row.sizes().vec();
  const auto all = whole_box(sizes);
  const auto none = box_of_rows(sizes, 0, 0, 0);
  const std::vector<Box> sends(group.ranks(), group.rank() == src ? all : none);
  std::vector<Box> receives(group.ranks(), none);
  receives[src] = all;
  const auto plan =
      encode_between(sizes, sends, receives, sizes, numel(all), group);
  return exchange(row, plan).squeeze(0);
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
