#include "shardtensor/collectives/key_bounds.h"

#include <algorithm>
#include <tuple>

#include <ATen/ops/arange.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/group.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kSamples = 64; // of each rank's keys

/// `count` places at even steps among `total`.
at::Tensor even_steps(
    int64_t begin,
    int64_t count,
    int64_t total,
    const at::Tensor& like) {
  return at::arange(begin, count, like.options().dtype(at::kLong))
      .mul(total)
      .floor_divide(std::max<int64_t>(count, 1));
}

} // namespace

at::Tensor bounds_between_ranks(
    const at::Tensor& ascending,
    const std::string& group) {
  const int64_t own = std::min(kSamples, ascending.numel());
  const auto samples = ascending.index_select(
      0, even_steps(0, own, ascending.numel(), ascending));
  const auto all =
      all_gather_rows(samples, 0, gather_number(own, group), group);
  if (all.numel() == 0) {
    return all;
  }
  return std::get<0>(all.sort())
      .index_select(0, even_steps(1, Group(group).ranks(), all.numel(), all));
}

} // namespace shardtensor::detail
