#include "shardtensor/collectives/unique_keys.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include <ATen/ops/_unique2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros_like.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/collectives/route.h"
#include "shardtensor/comm/group.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

constexpr int64_t kSamples = 64; // of each rank's keys

/// The rank that gets each key: bounds between ranks are keys at even steps of
/// all ranks' samples, the same everywhere.
Tensor owners_of(
    const Tensor& ascending,
    int64_t ranks,
    const std::string& group) {
  const int64_t own = std::min(kSamples, ascending.numel());
  const auto places = at::arange(own, ascending.options())
                          .mul(ascending.numel())
                          .floor_divide(std::max<int64_t>(own, 1));
  const auto all = all_gather_rows(
      ascending.index_select(0, places), 0, gather_number(own, group), group);
  if (all.numel() == 0) {
    return at::zeros_like(ascending);
  }
  const auto steps = at::arange(1, ranks, ascending.options())
                         .mul(all.numel())
                         .floor_divide(ranks);
  const auto bounds = std::get<0>(all.sort()).index_select(0, steps);
  return at::searchsorted(bounds, ascending, false, /*right=*/true);
}

} // namespace

int64_t UniqueKeys::all() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

UniqueKeys unique_keys(const Tensor& keys, const std::string& group) {
  const auto [mine, places, counts] = at::_unique2(keys, true, true);
  if (group.empty()) {
    return {mine, {mine.numel()}, places};
  }
  const auto ranks = Group(group).ranks();
  const Route route(owners_of(mine, ranks, group), group);
  const auto [owned, owned_places, owned_counts] =
      at::_unique2(route.send(mine), true, true);
  const auto sizes = gather_number(owned.numel(), group);
  const auto begin = std::accumulate(
      sizes.begin(), sizes.begin() + Group(group).rank(), int64_t{0});
  const auto numbers = route.answer(owned_places.add(begin));
  return {owned, sizes, numbers.index_select(0, places)};
}

} // namespace shardtensor::detail
