#include "shardtensor/collectives/unique_keys.h"

#include <numeric>

#include <ATen/ops/_unique2.h>
#include <ATen/ops/searchsorted.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/collectives/key_bounds.h"
#include "shardtensor/collectives/route.h"
#include "shardtensor/comm/group.h"

namespace shardtensor::detail {

using at::Tensor;

int64_t UniqueKeys::all() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

UniqueKeys unique_keys(const Tensor& keys, const std::string& group) {
  const auto [mine, places, counts] = at::_unique2(keys, true, true);
  if (group.empty()) {
    return {mine, {mine.numel()}, places};
  }
  const auto bounds = bounds_between_ranks(mine, group);
  const Route route(
      at::searchsorted(bounds, mine, /*out_int32=*/false, /*right=*/true),
      group);
  const auto [owned, owned_places, owned_counts] =
      at::_unique2(route.send(mine), true, true);
  const auto sizes = gather_number(owned.numel(), group);
  const auto begin = std::accumulate(
      sizes.begin(), sizes.begin() + Group(group).rank(), int64_t{0});
  const auto numbers = route.answer(owned_places.add(begin));
  return {owned, sizes, numbers.index_select(0, places)};
}

} // namespace shardtensor::detail
