#include "shardtensor/rules/points/neighbours.h"

#include <ATen/ops/stack.h>

#include "shardtensor/comm/ring.h"
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

/// Trees travel as their points; every rank meets the next one's while it
/// searches.
Neighbours find_by_ring(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud) {
  std::vector<std::vector<int64_t>> sizes;
  for (const auto& rows : cloud.rows) {
    sizes.push_back({packed_bytes(points, rows.extent())});
  }
  const auto own = pack_trees(points);
  std::optional<QuerySet> set;
  const auto meet = [&](int64_t owner, const at::Tensor& block) {
    const auto& rows = cloud.rows[owner];
    set->meet(unpack_trees(block, points, rows.extent(), rows.begin));
    return at::Tensor();
  };
  RingStops stops;
  stops.own = [&] {
    set.emplace(queries, wanted);
    meet(cloud.rank, own);
  };
  stops.other = meet;
  ring_tour_of_agreed(own, sizes, cloud.group, stops);
  return set->neighbours();
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
  std::vector<std::vector<int64_t>> sizes;
  for (const auto& rows : cloud.rows) {
    sizes.push_back({points.size(0), rows.extent(), points.size(2)});
  }
  RingStops stops;
  stops.own = [&] { meet(cloud.rank, points); };
  stops.other = meet;
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
