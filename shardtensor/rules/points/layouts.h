#pragma once

#include <string>
#include <vector>

#include "shardtensor/layout/interval.h"
#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// Which ranks hold a cloud together, and this rank's place among them.
struct CloudPieces {
  std::vector<Interval> rows; // of each rank of the group
  int64_t rank = 0;
  int64_t queries = 0; // of a rank, the mean
  std::string group; // "" where one rank has all points

  const Interval& own() const {
    return rows[rank];
  }
  int64_t points() const {
    return rows.back().end;
  }
};

/// The layouts of a search's operands, points ([B,] N, D) and queries ([B,] M,
/// D) of the same number of dims. Along each mesh axis, by how the queries
/// come:
///
/// - cut along B: so are the points;
/// - cut along M: points may be cut along N, and pieces meet, or are whole;
/// - whole: where the points are cut, so are the queries for the search, which
///   costs nothing, and what is found is gathered.
///
/// Axes whose ranks meet are one or all of the mesh; points are made whole
/// along others.
struct PointLayouts {
  SpecPtr points;
  SpecPtr queries;
  /// In which ranks compute terms of the points' gradient: they use whole
  /// points for different queries.
  SpecPtr point_terms;
  CloudPieces cloud;
};

/// `whole_queries`: each query's batch entry is on one rank with all its
/// queries, which results that stand query by query need.
PointLayouts plan_points(
    const SpecPtr& points,
    const SpecPtr& queries,
    bool whole_queries);

} // namespace shardtensor::detail
