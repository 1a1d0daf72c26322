#include "shardtensor/rules/points/neighbours.h"

#include "shardtensor/comm/ring.h"
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
  ring_tour(own, sizes, cloud.group, stops);
  return set->neighbours();
}

} // namespace

Neighbours find_neighbours(
    const at::Tensor& points,
    const at::Tensor& queries,
    const Wanted& wanted,
    const CloudPieces& cloud,
    PointTransport transport) {
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
