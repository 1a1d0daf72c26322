#include "shardtensor/layout/plans/split_repeats.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "shardtensor/layout/plans/links.h"

namespace shardtensor::detail {
namespace {

bool is_repeated(const Partition& partition) {
  return !partition.is_contiguous() && partition.extent() > 0;
}

/// Whether all cut points are multiples of `unit`.
bool is_cut_at(const Partition& partition, int64_t unit) {
  return std::ranges::all_of(
      partition.offsets(), [&](int64_t offset) { return offset % unit == 0; });
}

/// Whether one dim's cuts are no longer repeated once it is split.
bool splits(const Partition& from, const Partition& to) {
  const auto& [fine, coarse] =
      from.period() < to.period() ? std::tie(from, to) : std::tie(to, from);
  return (!is_repeated(from) && !is_repeated(to)) ||
      fine.period() == coarse.period() || is_cut_at(coarse, fine.period());
}

/// One layout while its dims are split one by one.
class Split {
 public:
  explicit Split(const SpecPtr& spec)
      : spec_(spec), placements_(spec->placements()) {}

  void keep(int64_t dim) {
    put(dim, spec_->size(dim), true, partition_of(*spec_, dim));
  }

  /// `dim` becomes (extent / outer, outer / inner, inner).
  void split(int64_t dim, int64_t outer, int64_t inner) {
    const auto own = partition_of(*spec_, dim);
    const bool cuts_inner = own.period() == inner;
    put(dim, own.extent() / outer, false, own);
    auto sizes = own.sizes();
    for (auto& size : sizes) {
      size /= cuts_inner ? 1 : inner;
    }
    put(dim, outer / inner, !cuts_inner, Partition(sizes));
    put(dim, inner, cuts_inner, Partition(sizes));
  }

  SpecPtr done() {
    return make_spec(spec_->mesh(), sizes_, placements_, partitions_);
  }

 private:
  void put(int64_t dim, int64_t size, bool is_cut, const Partition& partition) {
    const auto at = static_cast<int64_t>(sizes_.size());
    sizes_.push_back(size);
    partitions_.emplace_back();
    if (is_cut && spec_->is_sharded(dim)) {
      partitions_.back() = partition;
      for (const int64_t axis : spec_->axes(dim)) {
        placements_[axis] = Placement::shard(at);
      }
    }
  }

  SpecPtr spec_;
  std::vector<int64_t> sizes_;
  std::vector<Placement> placements_;
  ShardSpec::Partitions partitions_;
};

/// The cut points of a period moved to the nearest multiples of `unit`.
Partition rounded(const Partition& partition, int64_t unit) {
  std::vector<int64_t> sizes;
  int64_t before = 0;
  for (int64_t piece = 0; piece < partition.pieces(); ++piece) {
    const int64_t end =
        (partition.interval(piece).end + unit / 2) / unit * unit;
    sizes.push_back(end - before);
    before = end;
  }
  return Partition(sizes, partition.repeat());
}

} // namespace

std::optional<LayoutPair> split_repeats(
    const SpecPtr& from,
    const SpecPtr& to) {
  if (from->is_contiguous() && to->is_contiguous()) {
    return LayoutPair{from, to};
  }
  Split before(from);
  Split after(to);
  for (int64_t dim = 0; dim < from->dim(); ++dim) {
    const auto own = partition_of(*from, dim);
    const auto wanted = partition_of(*to, dim);
    if (!splits(own, wanted)) {
      return std::nullopt;
    }
    if (is_repeated(own) || is_repeated(wanted)) {
      const auto [inner, outer] = std::minmax({own.period(), wanted.period()});
      before.split(dim, outer, inner);
      after.split(dim, outer, inner);
    } else {
      before.keep(dim);
      after.keep(dim);
    }
  }
  return LayoutPair{before.done(), after.done()};
}

SpecPtr layout_between(const SpecPtr& from, const SpecPtr& to) {
  for (int64_t dim = 0; dim < from->dim(); ++dim) {
    const auto own = partition_of(*from, dim);
    const auto wanted = partition_of(*to, dim);
    if (splits(own, wanted)) {
      continue;
    }
    const auto [fine, coarse] = std::minmax({own.period(), wanted.period()});
    if (coarse % fine != 0) { // both are repeated, in no common rhythm
      return with_partition(to, dim, Partition(wanted.local_extents()));
    }
    return own.period() == coarse
        ? with_partition(from, dim, rounded(own, fine))
        : with_partition(to, dim, rounded(wanted, fine));
  }
  return to;
}

} // namespace shardtensor::detail
