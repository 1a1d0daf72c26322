#include "shardtensor/halo/halo_padding.h"

#include <utility>

#include <c10/core/WrapDimMinimal.h>
#include <torch/library.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/comm/primitives/exchange_code.h"

namespace shardtensor {

using namespace detail;

namespace {

void check_width(
    const at::Tensor& x,
    int64_t dim,
    int64_t width,
    int64_t edge_padding,
    int64_t ranks) {
  TORCH_CHECK_VALUE(
      width >= 0 && edge_padding >= 0,
      "halo_padding: width ",
      width,
      " and edge_padding ",
      edge_padding,
      ", expected no negative number");
  TORCH_CHECK_VALUE(
      x.size(dim) >= width || ranks == 1,
      "halo_padding: x has sizes ",
      x.sizes(),
      ", expected at least ",
      width,
      " rows in dim ",
      dim,
      "; halo_exchange takes any width");
}

} // namespace

at::Tensor halo_padding(
    const at::Tensor& x,
    int64_t dim,
    int64_t width,
    int64_t edge_padding,
    const std::string& group_name) {
  const Group group(group_name);
  agree_on_call(group, x, [&]() -> Collective {
    dim = c10::maybe_wrap_dim(dim, x.dim());
    check_width(x, dim, width, edge_padding, group.ranks());
    const auto padding =
        c10::str(", width ", width, ", edge_padding ", edge_padding);
    return {text_of_rows("halo_padding", x, dim) + padding, "", {}, {}};
  });
  const int64_t rank = group.rank();
  const int64_t extent = x.size(dim);
  const bool is_first = rank == 0;
  const bool is_last = rank == group.ranks() - 1;
  const int64_t before = is_first ? edge_padding : width;
  const int64_t after = is_last ? edge_padding : width;

  ExchangePlan plan;
  plan.source_sizes = x.sizes().vec();
  plan.target_sizes = plan.source_sizes;
  plan.target_sizes[dim] = before + extent + after;
  plan.covers = (!is_first && !is_last) || edge_padding == 0;
  const auto send = [&](int64_t to, int64_t begin, int64_t end) {
    const Box box = box_of_rows(x.sizes(), dim, begin, end);
    plan.sends.push_back({rank, to, box, box});
  };
  const auto receive = [&](int64_t from, int64_t begin, int64_t end) {
    const Box box = box_of_rows(x.sizes(), dim, begin, end);
    plan.receives.push_back({from, rank, box, box});
  };
  if (!is_first) {
    send(rank - 1, 0, width);
    receive(rank - 1, 0, width);
  }
  send(rank, 0, extent);
  receive(rank, before, before + extent);
  if (!is_last) {
    send(rank + 1, extent - width, extent);
    receive(rank + 1, before + extent, before + extent + width);
  }
  plan.largest_message = std::nullopt; // nobody knows the others' sizes
  return exchange(x, encode(std::move(plan), group));
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("halo_padding", halo_padding);
}

} // namespace shardtensor
