#include "shardtensor/rules/index/kept_exchanges.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/stats.h"
#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/mesh_axes.h"
#include "shardtensor/rules/index/owners_order.h"
#include "shardtensor/rules/index/row_terms.h"
#include "shardtensor/rules/index/rows.h"
#include "shardtensor/tensor/shown_elements.h"

namespace shardtensor::detail {

std::vector<RecentExchanges::Exchange> RecentExchanges::find(
    const SpecPtr& index,
    const SpecPtr& rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Exchange> found;
  for (const auto& [of_rows, exchange] : by_mesh_[rows->mesh()]) {
    if (of_rows == rows && exchange->index_spec() == index) {
      found.push_back(exchange);
    }
  }
  return found;
}

void RecentExchanges::use(const SpecPtr& rows, const Exchange& exchange) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& entries = by_mesh_[rows->mesh()];
  std::erase_if(
      entries, [&](const Entry& one) { return one.exchange == exchange; });
  entries.push_front({rows, exchange});
  const auto elements = [](const Entry& one) {
    return one.exchange->index_spec()->numel();
  };
  const auto largest =
      elements(*std::ranges::max_element(entries, {}, elements));
  size_t count = 0;
  int64_t sum = 0;
  const auto too_many = std::ranges::find_if(entries, [&](const Entry& one) {
    sum += elements(one);
    return ++count > kMost || sum > kLargest * largest;
  });
  entries.erase(too_many, entries.end());
}

namespace {

/// See Note [Shown elements].
struct KnownExchange {
  SpecPtr rows;
  bool may_be_negative;
  std::shared_ptr<const RowExchange> exchange;
};

/// The index cut along the axes of the rows alone; null where one of those does
/// not cut it.
SpecPtr layout_of_index(
    const SpecPtr& index,
    const std::vector<int64_t>& axes) {
  std::vector<Placement> placements(index->mesh()->axes());
  for (const auto axis : axes) {
    if (!index->placement(axis).is_shard()) {
      return nullptr;
    }
    placements[axis] = index->placement(axis);
  }
  return with_placements(index, std::move(placements));
}

/// The rows that a local index names, from the first one on.
at::Tensor named_rows(const at::Tensor& index, int64_t extent) {
  return nonnegative_rows(index.flatten(), extent);
}

KnownOfShown<KnownExchange, 32>& known_exchanges() {
  static auto& known = *new KnownOfShown<KnownExchange, 32>();
  return known;
}

RecentExchanges& recent_exchanges() {
  static auto& recent = *new RecentExchanges();
  return recent;
}

/// The layouts in which an index and rows meet.
struct MeetingLayouts {
  SpecPtr index;
  SpecPtr rows; // of one dim
};

/// None where another way is needed.
std::optional<MeetingLayouts> layouts_to_meet(
    const at::Tensor& index,
    const SpecPtr& spec,
    int64_t dim) {
  if (!is_shard_tensor(index) || !spec->is_sharded(dim) ||
      shardtensor::spec(index)->mesh() != spec->mesh() ||
      is_traced(impl_of(index)->local()) ||
      !group_of(*spec->mesh(), spec->axes(dim))) {
    return std::nullopt;
  }
  auto wanted = layout_of_index(shardtensor::spec(index), spec->axes(dim));
  if (!wanted) {
    return std::nullopt;
  }
  return MeetingLayouts{std::move(wanted), layout_of_dim(spec, dim)};
}

/// The exchange that an index of the same values was made for. Raises for an
/// index out of bounds.
std::shared_ptr<const RowExchange> find_same(
    const char* op,
    const at::Tensor& index,
    const at::Tensor& named,
    const std::vector<std::shared_ptr<const RowExchange>>& recent,
    int64_t extent,
    bool may_be_negative) {
  if (recent.empty()) {
    check_planned_index(op, index, 0, extent, may_be_negative);
    return nullptr;
  }
  if (index.numel() == 0) {
    return recent.front();
  }
  std::vector<at::Tensor> differ;
  for (const auto& exchange : recent) {
    differ.push_back(exchange->differs_from(named));
  }
  const auto on_any_rank = check_planned_index_and_reduce(
      op, index, extent, may_be_negative, at::stack(differ));
  const auto same = std::ranges::find(on_any_rank, 0);
  return same == on_any_rank.end() ? nullptr
                                   : recent[same - on_any_rank.begin()];
}

} // namespace

std::shared_ptr<const RowExchange> row_exchange(
    const char* op,
    const at::Tensor& index,
    const SpecPtr& spec,
    int64_t dim,
    bool may_be_negative) {
  const auto layouts = layouts_to_meet(index, spec, dim);
  if (!layouts) {
    return nullptr;
  }
  const auto& rows = layouts->rows;
  note_row_layout(shardtensor::spec(index), rows);
  auto shown = shown_elements(index);
  const auto is_meant = [&](const KnownExchange& one) {
    return one.rows == rows && one.may_be_negative == may_be_negative;
  };
  if (const auto found = known_exchanges().find(shown, is_meant)) {
    return found->exchange;
  }
  const CommScope scope(op);
  const auto extent = rows->size(0);
  const auto& wanted = layouts->index;
  const OwnersOrder order(rows, {0});
  const auto owned = order.layout();
  const auto named =
      order.rows({named_rows(local_of(index, wanted).tensor, extent)});
  if (named.is_meta()) {
    return std::make_shared<const RowExchange>(named, wanted, owned);
  }
  auto& recent = recent_exchanges();
  auto exchange = find_same(
      op, index, named, recent.find(wanted, owned), extent, may_be_negative);
  if (!exchange) {
    exchange = std::make_shared<const RowExchange>(named, wanted, owned);
    count_plan();
  }
  recent.use(owned, exchange);
  known_exchanges().add(std::move(shown), {rows, may_be_negative, exchange});
  return exchange;
}

void plan_whole_index(
    const char* op,
    const at::Tensor& whole,
    const at::Tensor& cut,
    const SpecPtr& spec,
    int64_t dim,
    bool may_be_negative) {
  const auto layouts = layouts_to_meet(cut, spec, dim);
  if (!layouts || whole.is_meta()) {
    return;
  }
  const auto& [wanted, rows] = *layouts;
  const auto extent = rows->size(0);
  check_planned_index(op, whole, dim, extent, may_be_negative);
  const OwnersOrder order(rows, {0});
  const auto owned = order.layout();
  const auto all_named = order.rows({named_rows(whole, extent)});
  auto& recent = recent_exchanges();
  const auto made = recent.find(wanted, owned);
  const auto digest = digest_of(all_named);
  const auto same = std::ranges::find_if(made, [&](const auto& exchange) {
    return exchange->is_of_whole(digest);
  });
  auto exchange = same == made.end() ? nullptr : *same;
  if (!exchange) {
    const auto named =
        order.rows({named_rows(local_of(cut, wanted).tensor, extent)});
    exchange =
        std::make_shared<const RowExchange>(named, wanted, owned, all_named);
    count_plan();
  }
  recent.use(owned, exchange);
  known_exchanges().add(
      shown_elements(cut), {rows, may_be_negative, std::move(exchange)});
}

} // namespace shardtensor::detail
