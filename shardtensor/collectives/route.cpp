#include "shardtensor/collectives/route.h"

#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/tensor.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/transforms.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Numbers = std::vector<int64_t>;

Numbers count(const Tensor& owners, int64_t ranks) {
  Numbers counts(ranks, 0);
  const auto* const owner = owners.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < owners.numel(); ++row) {
    ++counts[owner[row]];
  }
  return counts;
}

/// Rows by owner, each owner's in order: with so few owners faster than a sort.
Tensor rows_by_owner(const Tensor& owners, const Numbers& counts) {
  Numbers next(counts.size(), 0);
  std::partial_sum(counts.begin(), counts.end() - 1, next.begin() + 1);
  const auto order = at::empty({owners.numel()}, owners.options());
  const auto* const owner = owners.const_data_ptr<int64_t>();
  auto* const rows = order.mutable_data_ptr<int64_t>();
  for (int64_t row = 0; row < owners.numel(); ++row) {
    rows[next[owner[row]]++] = row;
  }
  return order;
}

/// How many rows each rank sends here, which tells each rank how many it gets.
Numbers counts_from_others(
    const Numbers& sent,
    const at::TensorOptions& options,
    const std::string& group) {
  const Numbers one(sent.size(), 1);
  return host_numbers(all_to_all_rows(
      at::tensor(sent, options.dtype(at::kLong)), 0, one, one, group));
}

} // namespace

Route::Route(const Tensor& owners, std::string group)
    : group_(std::move(group)) {
  const auto ranks = Group(group_).ranks();
  const OutsideTransforms of_all_levels;
  const auto on_host = value_inside(owners).cpu().contiguous();
  sent_ = count(on_host, ranks);
  order_ = rows_by_owner(on_host, sent_).to(owners.device());
  received_ = counts_from_others(sent_, owners.options(), group_);
}

Route::Route(
    std::vector<int64_t> counts,
    const at::TensorOptions& options,
    std::string group)
    : group_(std::move(group)),
      sent_(std::move(counts)),
      received_(counts_from_others(sent_, options, group_)) {}

Tensor Route::send(const Tensor& rows) const {
  return all_to_all_rows(
      order_.defined() ? rows.index_select(0, order_) : rows,
      0,
      sent_,
      received_,
      group_);
}

Tensor Route::answer(const Tensor& answers) const {
  const auto come = all_to_all_rows(answers, 0, received_, sent_, group_);
  return order_.defined() ? at::empty_like(come).index_copy_(0, order_, come)
                          : come;
}

Tensor pieces_of(const Tensor& given, const Partition& partition) {
  const OutsideTransforms of_all_levels;
  const auto rows = value_inside(given);
  const auto ends = at::tensor(partition.offsets(), rows.options()).slice(0, 1);
  return at::searchsorted(ends, rows, /*out_int32=*/false, /*right=*/true);
}

} // namespace shardtensor::detail
