#include "shardtensor/rules/points/layouts.h"

#include "shardtensor/layout/mesh_axes.h"

namespace shardtensor::detail {
namespace {

using Axes = std::vector<int64_t>;
using Placements = std::vector<Placement>;

/// Neither Partial nor cut coordinates; rows in one interval each.
SpecPtr searchable(const SpecPtr& given) {
  auto spec = without_shard(without_partial(given), given->dim() - 1);
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    if (spec->is_sharded(dim) && !spec->partition(dim).is_contiguous()) {
      const auto pieces = spec->partition(dim).pieces();
      spec = with_partition(
          spec, dim, Partition::chunked(spec->size(dim), pieces));
    }
  }
  return spec;
}

class Planner {
 public:
  Planner(const SpecPtr& points, const SpecPtr& queries, bool whole_queries)
      : mesh_(*queries->mesh()),
        rows_(queries->dim() - 2),
        points_(searchable(points)),
        queries_(searchable(queries)),
        point_placements_(points_->placements()),
        query_placements_(queries_->placements()),
        whole_queries_(whole_queries && rows_ == 1) {}

  PointLayouts plan() {
    for (int64_t axis = 0; axis < mesh_.axes(); ++axis) {
      agree(axis);
    }
    keep_one_ring();
    PointLayouts layouts;
    layouts.queries = queries_layout();
    layouts.points = points_layout(*layouts.queries);
    layouts.point_terms = terms(layouts.points);
    layouts.cloud = pieces(*layouts.points, *layouts.queries);
    return layouts;
  }

 private:
  void agree(int64_t axis) {
    auto& query = query_placements_[axis];
    auto& point = point_placements_[axis];
    if (query.is_replicate()) {
      query = point;
    }
    if (rows_ == 1 && query.is_shard() &&
        (whole_queries_ || query.is_shard(0))) {
      query = point = Placement::shard(0);
    } else if (!point.is_shard(rows_)) {
      point = Placement::replicate();
    }
  }

  void keep_one_ring() {
    const auto axes = axes_of(point_placements_, rows_);
    if (axes.size() > 1 && static_cast<int64_t>(axes.size()) < mesh_.axes()) {
      for (size_t i = 0; i + 1 < axes.size(); ++i) {
        point_placements_[axes[i]] = Placement::replicate();
      }
    }
  }

  /// A batch that only the points cut is cut as theirs.
  SpecPtr queries_layout() const {
    ShardSpec::Partitions partitions(queries_->dim());
    const auto axes = axes_of(query_placements_, 0);
    if (rows_ == 1 && !axes.empty() && queries_->axes(0) != axes &&
        points_->axes(0) == axes) {
      partitions[0] = points_->partition(0);
    }
    return with_placements(queries_, query_placements_, partitions);
  }

  SpecPtr points_layout(const ShardSpec& queries) const {
    ShardSpec::Partitions partitions(points_->dim());
    if (rows_ == 1 && queries.is_sharded(0)) {
      partitions[0] = queries.partition(0);
    }
    return with_placements(points_, point_placements_, partitions);
  }

  SpecPtr terms(const SpecPtr& points) const {
    auto placements = points->placements();
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      if (placements[axis].is_replicate() &&
          query_placements_[axis].is_shard()) {
        placements[axis] = Placement::partial();
      }
    }
    return with_placements(points, placements);
  }

  CloudPieces pieces(const ShardSpec& points, const ShardSpec& queries) const {
    const auto axes = points.axes(rows_);
    CloudPieces cloud;
    if (axes.empty() || !mesh_.contains_this_rank()) {
      cloud.rows = {{0, points.size(rows_)}};
      return cloud;
    }
    cloud.group = group_of(mesh_, axes).value();
    cloud.rank = mesh_.piece(mesh_.position(), axes);
    cloud.queries = queries.size(rows_) /
        (queries.is_sharded(rows_) ? queries.partition(rows_).pieces() : 1);
    for (int64_t piece = 0; piece < points.partition(rows_).pieces(); ++piece) {
      cloud.rows.push_back(points.partition(rows_).interval(piece));
    }
    return cloud;
  }

  const Mesh& mesh_;
  int64_t rows_; // the dim
  SpecPtr points_;
  SpecPtr queries_;
  Placements point_placements_;
  Placements query_placements_;
  bool whole_queries_;
};

} // namespace

PointLayouts plan_points(
    const SpecPtr& points,
    const SpecPtr& queries,
    bool whole_queries) {
  return Planner(points, queries, whole_queries).plan();
}

} // namespace shardtensor::detail
