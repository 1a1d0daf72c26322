#include "shardtensor/rules/points/neighbours.h"

#include <optional>
#include <utility>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include "shardtensor/collectives/ring.h"
#include "shardtensor/points/tiles.h"
#include "shardtensor/rules/points/by_boxes.h"
#include "shardtensor/rules/points/query_set.h"

namespace shardtensor::detail {
namespace {

Neighbours find_locally(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted) {
  QuerySet set(queries, wanted);
  set.meet(make_trees(points, 0));
  return set.neighbours();
}

using BlockSizes = std::vector<std::vector<int64_t>>;

BlockSizes sizes_as_they_are(
    const at::Tensor& points,
    const CloudPieces& cloud) {
  BlockSizes sizes;
  for (const auto& rows : cloud.rows) {
    sizes.push_back({points.size(0), rows.extent(), points.size(2)});
  }
  return sizes;
}

// Note [Joined pieces]
// A query looks at half as many points in one tree as in two of half its size.
// To sort both pieces anew, on every rank, takes as long as that saves where
// there are several times as many points as own queries; then a piece is sorted
// by its owner alone, and travels in the order of its tree. Memory is bounded
// by the own queries, too.
constexpr int64_t kPointsPerQuery = 3;

int64_t points_of_a_tree(const CloudPieces& cloud) {
  return kPointsPerQuery * cloud.queries;
}

/// Two pieces make a tree.
bool are_joined(const CloudPieces& cloud) {
  return 2 * cloud.points() <=
      points_of_a_tree(cloud) * static_cast<int64_t>(cloud.rows.size());
}

/// The queries after all blocks have come by, this rank's first.
template <class Visit>
QuerySet meet_on_a_tour(
    const at::Tensor& own,
    const BlockSizes& sizes,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud,
    const Visit& visit) {
  std::optional<QuerySet> set;
  RingStops stops;
  stops.own = [&] {
    set.emplace(queries, wanted);
    visit(*set, cloud.rank, own);
  };
  stops.other = [&](int64_t owner, const at::Tensor& block) {
    visit(*set, owner, block);
    return at::Tensor();
  };
  ring_tour_of_agreed(own, sizes, cloud.group, stops);
  return std::move(*set);
}

/// Pieces that wait until there are enough for a tree.
class WaitingPieces {
 public:
  explicit WaitingPieces(int64_t most) : most_(most) {}

  void take(QuerySet& set, const at::Tensor& points, const Interval& rows) {
    if (count_ + rows.extent() > most_) {
      search(set);
    }
    points_.push_back(points);
    rows_.push_back(at::arange(rows.begin, rows.end, at::kInt));
    count_ += rows.extent();
  }
  void search(QuerySet& set) {
    if (!points_.empty()) {
      set.meet(make_trees(at::cat(points_, 1), at::cat(rows_)));
    }
    points_.clear();
    rows_.clear();
    count_ = 0;
  }

 private:
  int64_t most_;
  int64_t count_ = 0;
  std::vector<at::Tensor> points_;
  std::vector<at::Tensor> rows_;
};

Neighbours find_in_joined_pieces(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud) {
  WaitingPieces pieces(points_of_a_tree(cloud));
  const auto take = [&](QuerySet& set, int64_t owner, const at::Tensor& block) {
    pieces.take(set, block, cloud.rows[owner]);
  };
  const auto sizes = sizes_as_they_are(points, cloud);
  auto set = meet_on_a_tour(points, sizes, queries, wanted, cloud, take);
  pieces.search(set);
  return set.neighbours();
}

/// Trees travel as their points; every rank meets the next one's while it
/// searches.
Neighbours find_by_ring(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud) {
  if (are_joined(cloud)) {
    return find_in_joined_pieces(points, queries, wanted, cloud);
  }
  BlockSizes sizes;
  for (const auto& rows : cloud.rows) {
    sizes.push_back({packed_bytes(points, rows.extent())});
  }
  const auto meet = [&](QuerySet& set, int64_t owner, const at::Tensor& block) {
    const auto& rows = cloud.rows[owner];
    set.meet(unpack_trees(block, points, rows.extent(), rows.begin));
  };
  return meet_on_a_tour(pack_trees(points), sizes, queries, wanted, cloud, meet)
      .neighbours();
}

/// What each batch entry found, side by side.
Neighbours joined(
    const std::vector<TileSearch>& searches,
    const at::Tensor& queries,
    const Wanted& wanted) {
  Neighbours found;
  if (!wanted.most) {
    for (const auto& search : searches) {
      found.pairs.push_back(search.pairs());
    }
    return found;
  }
  std::vector<at::Tensor> squares;
  std::vector<at::Tensor> rows;
  for (const auto& search : searches) {
    squares.push_back(search.nearest().squares);
    rows.push_back(search.nearest().rows);
  }
  found.nearest = searches.empty()
      ? Nearest::none(queries, *wanted.most)
      : Nearest{at::stack(squares), at::stack(rows)};
  return found;
}

/// On a device: points pass all ranks as they are.
Neighbours find_in_tiles(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud) {
  std::vector<TileSearch> searches;
  for (const auto& entry : queries.unbind(0)) {
    searches.emplace_back(entry, wanted.most, wanted.radius);
  }
  const auto meet = [&](int64_t owner, const at::Tensor& block) {
    for (size_t entry = 0; entry < searches.size(); ++entry) {
      searches[entry].meet(
          block.select(0, static_cast<int64_t>(entry)),
          cloud.rows[owner].begin);
    }
    return at::Tensor();
  };
  if (cloud.group.empty()) {
    meet(0, points);
    return joined(searches, queries, wanted);
  }
  RingStops stops;
  stops.own = [&] { meet(cloud.rank, points); };
  stops.other = meet;
  const auto sizes = sizes_as_they_are(points, cloud);
  ring_tour_of_agreed(points, sizes, cloud.group, stops);
  return joined(searches, queries, wanted);
}

} // namespace

Neighbours find_neighbours(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud,
    PointTransport transport) {
  if (!points.is_cpu()) {
    return find_in_tiles(points, queries, wanted, cloud);
  }
  if (cloud.group.empty()) {
    return find_locally(points, queries, wanted);
  }
  if (transport == PointTransport::Ring) {
    return find_by_ring(points, queries, wanted, cloud);
  }
  const auto boxes = gather_boxes(points, queries, cloud);
  if (transport == PointTransport::Auto && !are_apart(boxes, wanted, cloud)) {
    return find_by_ring(points, queries, wanted, cloud);
  }
  return find_by_boxes(points, queries, wanted, cloud, boxes);
}

} // namespace shardtensor::detail
