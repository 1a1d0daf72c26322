#include "shardtensor/rules/attention/layouts.h"

#include <algorithm>
#include <numeric>

#include "shardtensor/layout/mesh_axes.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/rules/attention/cost.h"

namespace shardtensor::detail {
namespace {

using Placements = std::vector<Placement>;
using Axes = std::vector<int64_t>;

/// torch.chunk's split over these axes.
Partition chunked(const Mesh& mesh, int64_t extent, const Axes& axes) {
  std::vector<int64_t> ranks;
  for (const int64_t axis : axes) {
    ranks.push_back(mesh.ranks(axis));
  }
  return Partition::chunked(extent, ranks);
}

/// True where each piece is a whole number of groups.
bool divides(const Partition& partition, int64_t group) {
  const auto& offsets = partition.offsets();
  return std::all_of(offsets.begin(), offsets.end(), [&](int64_t offset) {
    return offset % group == 0;
  });
}

/// The pieces of each `by` neighbours joined.
Partition joined(const Partition& partition, int64_t by) {
  const auto sizes = partition.sizes();
  std::vector<int64_t> result;
  for (auto piece = sizes.begin(); piece != sizes.end(); piece += by) {
    result.push_back(std::accumulate(piece, piece + by, int64_t{0}));
  }
  return Partition(result);
}

Partition divided(const Partition& partition, int64_t by) {
  auto sizes = partition.sizes();
  for (auto& size : sizes) {
    size /= by;
  }
  return Partition(sizes);
}

class Planner {
 public:
  Planner(
      const SpecPtr& query,
      const SpecPtr& key,
      bool causal,
      AttentionTransport transport)
      : rows_(query->dim() - 2),
        heads_(query->dim() - 3),
        mesh_(*query->mesh()),
        query_(whole_features(query)),
        key_(contiguous_rows(key)),
        causal_(causal),
        transport_(transport),
        query_placements_(query_->placements()),
        key_placements_(query_->placements()) {
    if (heads_ >= 0 && key->size(heads_) > 0) {
      group_ = query->size(heads_) / key->size(heads_);
    }
    place_keys();
    choose_ring();
  }

  AttentionLayouts plan(
      const SpecPtr& value,
      const SpecPtr& mask,
      int64_t bytes) {
    if (transport_ == AttentionTransport::Auto) {
      transport_ = cheapest(*value, mask, bytes);
    }
    if (transport_ == AttentionTransport::Grid && ring_.size() > 2) {
      transport_ = AttentionTransport::Ring; // no group joins all axes but one
    }
    cut_heads();
    AttentionLayouts result;
    result.query = query_layout();
    result.splits_groups = splits_groups(*result.query);
    if (result.splits_groups) {
      return result;
    }
    const auto partitions = key_partitions(*result.query);
    const auto like_key = [&](const ShardSpec& x) {
      return make_spec(x.mesh(), x.sizes(), key_placements_, partitions);
    };
    result.key = like_key(*key_);
    result.value = like_key(*value);
    const int64_t features = value->size(value->dim() - 1);
    result.output = with_features(result.query, features);
    result.result = with_features(query_, features);
    result.query_terms = terms(result.query, key_placements_);
    result.key_terms = terms(result.key, query_placements_);
    result.value_terms = terms(result.value, query_placements_);
    if (mask) {
      result.mask = mask_layout(*mask, *result.query);
      result.mask_terms =
          terms(terms(result.mask, query_placements_), key_placements_);
    }
    result.work = work(*result.query, *result.key);
    return result;
  }

 private:
  /// Batches may be cut repeatedly: windows of several images are.
  static SpecPtr contiguous_rows(SpecPtr spec) {
    for (const int64_t dim : {spec->dim() - 2, spec->dim() - 3}) {
      if (dim >= 0 && spec->is_sharded(dim)) {
        spec = contiguous_dim(spec, dim);
      }
    }
    return spec;
  }
  static SpecPtr whole_features(const SpecPtr& spec) {
    return contiguous_rows(
        without_shard(without_partial(spec), spec->dim() - 1));
  }
  static SpecPtr with_features(const SpecPtr& spec, int64_t features) {
    auto sizes = spec->sizes();
    sizes.back() = features;
    return with_sizes(spec, std::move(sizes));
  }

  void place_keys() {
    for (int64_t axis = 0; axis < mesh_.axes(); ++axis) {
      const auto& given = key_->placement(axis);
      auto& query = query_placements_[axis];
      auto& key = key_placements_[axis];
      if (query.is_shard(rows_)) {
        key = given.is_replicate() ? given : query;
      } else if (query.is_replicate() && given.is_shard()) {
        key = given.dim <= rows_ ? given : query;
        query = given.dim < rows_ ? given : query;
      }
    }
  }

  /// The axes along which queries meet the keys of other ranks: one, or all.
  void choose_ring() {
    ring_ = axes_of(key_placements_, rows_);
    if (ring_.size() > 1 && static_cast<int64_t>(ring_.size()) < mesh_.axes()) {
      for (size_t i = 0; i + 1 < ring_.size(); ++i) {
        key_placements_[ring_[i]] = Placement::replicate();
      }
      ring_ = {ring_.back()};
    }
    const auto is_cut = [&](int64_t axis) {
      return query_placements_[axis].is_shard();
    };
    merges_ = std::none_of(ring_.begin(), ring_.end(), is_cut);
    for (const int64_t axis : ring_) {
      if (!merges_) {
        query_placements_[axis] = Placement::shard(rows_);
      }
    }
  }

  /// By the layouts that rows in their place would have.
  AttentionTransport cheapest(
      const ShardSpec& value,
      const SpecPtr& mask,
      int64_t bytes) const {
    if (ring_.empty() || merges_) {
      return AttentionTransport::Ring;
    }
    const auto query = query_layout();
    AttentionSizes sizes;
    sizes.ranks = 1;
    for (const int64_t axis : ring_) {
      sizes.ranks *= mesh_.ranks(axis);
    }
    sizes.last_ranks = ring_.size() == 2 ? mesh_.ranks(ring_.back()) : 1;
    for (int64_t dim = 0; dim < rows_; ++dim) {
      auto& count = dim == heads_ ? sizes.heads : sizes.batch;
      count *= most(*query, dim);
    }
    sizes.key_heads = std::max<int64_t>(sizes.heads / group_, 1);
    sizes.queries = query->size(rows_);
    sizes.keys = key_->size(rows_);
    sizes.most_queries = most(*query, rows_);
    sizes.most_keys =
        most(rows_of_fewer(*key_, axes_of(key_placements_, rows_)));
    sizes.features = query->size(rows_ + 1);
    sizes.value_features = value.size(rows_ + 1);
    sizes.bytes = bytes;
    sizes.causal = causal_;
    sizes.has_mask_rows = heads_ < 0 || (mask && mask->size(rows_) > 1);
    return choose_transport(sizes);
  }
  /// The extent of the largest piece.
  static int64_t most(const ShardSpec& spec, int64_t dim) {
    return spec.is_sharded(dim) ? most(spec.partition(dim)) : spec.size(dim);
  }
  static int64_t most(const Partition& partition) {
    const auto sizes = partition.sizes();
    return partition.repeat() * *std::max_element(sizes.begin(), sizes.end());
  }

  /// In the place of rows.
  void cut_heads() {
    const bool all = transport_ == AttentionTransport::AllToAll;
    if (merges_ || heads_ < 0 ||
        !(all || transport_ == AttentionTransport::Grid)) {
      return;
    }
    const size_t first = all || ring_.empty() ? 0 : ring_.size() - 1;
    for (size_t i = first; i < ring_.size(); ++i) {
      query_placements_[ring_[i]] = Placement::shard(heads_);
      key_placements_[ring_[i]] = Placement::shard(heads_);
    }
    ring_.resize(first);
  }

  SpecPtr query_layout() const {
    ShardSpec::Partitions partitions(query_->dim());
    for (int64_t dim = 0; dim <= rows_; ++dim) {
      const auto axes = axes_of(query_placements_, dim);
      const int64_t group = dim == heads_ ? group_ : 1;
      if (axes.empty()) {
        continue;
      }
      if (query_->axes(dim) == axes) {
        partitions[dim] = query_->partition(dim);
      } else if (dim < rows_ && key_->axes(dim) == axes) {
        partitions[dim] = key_->partition(dim).scaled(group);
      } else if (dim == rows_) {
        partitions[dim] = rows_of_fewer(*query_, axes);
      } else {
        partitions[dim] =
            chunked(mesh_, query_->size(dim) / group, axes).scaled(group);
      }
    }
    return make_spec(
        query_->mesh(), query_->sizes(), query_placements_, partitions);
  }

  bool splits_groups(const ShardSpec& query) const {
    return group_ > 1 && query.is_sharded(heads_) &&
        !divides(query.partition(heads_), group_);
  }

  ShardSpec::Partitions key_partitions(const ShardSpec& query) const {
    ShardSpec::Partitions partitions(query.dim());
    for (int64_t dim = 0; dim < rows_; ++dim) {
      if (!axes_of(key_placements_, dim).empty()) {
        partitions[dim] = dim == heads_ ? divided(query.partition(dim), group_)
                                        : query.partition(dim);
      }
    }
    const auto axes = axes_of(key_placements_, rows_);
    if (!axes.empty()) {
      partitions[rows_] = rows_of_fewer(*key_, axes);
    }
    return partitions;
  }

  /// How these axes cut the rows: as they did, or as they did with a last one
  /// that no longer does.
  Partition rows_of_fewer(const ShardSpec& spec, const Axes& axes) const {
    auto given = spec.is_sharded(rows_) ? spec.axes(rows_) : Axes{};
    int64_t last = 1;
    if (given.size() == axes.size() + 1) {
      last = mesh_.ranks(given.back());
      given.pop_back();
    }
    return given == axes ? joined(spec.partition(rows_), last)
                         : chunked(mesh_, spec.size(rows_), axes);
  }

  /// Cut as the query where it does not broadcast; all keys.
  SpecPtr mask_layout(const ShardSpec& mask, const ShardSpec& query) const {
    auto placements = query.placements();
    for (auto& placement : placements) {
      if (placement.is_shard() &&
          mask.size(placement.dim) != query.size(placement.dim)) {
        placement = Placement::replicate();
      }
    }
    auto partitions = query.partitions();
    for (int64_t dim = 0; dim < mask.dim(); ++dim) {
      if (axes_of(placements, dim).empty()) {
        partitions[dim].reset();
      }
    }
    return make_spec(mask.mesh(), mask.sizes(), placements, partitions);
  }

  /// Where ranks that share a tensor use it for different work.
  static SpecPtr terms(const SpecPtr& spec, const Placements& others) {
    auto placements = spec->placements();
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      if (placements[axis].is_replicate() && others[axis].is_shard()) {
        placements[axis] = Placement::partial();
      }
    }
    return with_placements(spec, placements);
  }

  AttentionWork work(const ShardSpec& query, const ShardSpec& key) const {
    AttentionWork work;
    work.causal = causal_;
    if (ring_.empty() || !mesh_.contains_this_rank()) {
      work.queries = {{query.interval(rows_)}};
      work.keys = {{{0, key.local_sizes()[rows_]}}};
      return work;
    }
    for (const int64_t position : positions_in_ring()) {
      work.queries.push_back({rows_of(query, position)});
      work.keys.push_back({rows_of(key, position)});
    }
    work.rank = mesh_.piece(mesh_.position(), ring_);
    work.group = group_of(mesh_, ring_).value();
    work.meeting = merges_                            ? Meeting::Merge
        : transport_ == AttentionTransport::AllGather ? Meeting::AllGather
                                                      : Meeting::Ring;
    work.balanced = causal_ && !merges_ && work.keys.size() > 1 &&
        query.axes(rows_) == key.axes(rows_) &&
        query.size(rows_) == key.size(rows_);
    return work;
  }
  /// Of the ranks that differ from this one along the ring alone, in its order.
  std::vector<int64_t> positions_in_ring() const {
    Axes others;
    for (int64_t axis = 0; axis < mesh_.axes(); ++axis) {
      if (std::find(ring_.begin(), ring_.end(), axis) == ring_.end()) {
        others.push_back(axis);
      }
    }
    const auto place = mesh_.piece(mesh_.position(), others);
    std::vector<int64_t> positions;
    for (int64_t position = 0; position < mesh_.ranks(); ++position) {
      if (mesh_.piece(position, others) == place) {
        positions.push_back(position);
      }
    }
    return positions;
  }
  Interval rows_of(const ShardSpec& spec, int64_t position) const {
    return spec.is_sharded(rows_) ? spec.interval(rows_, position)
                                  : Interval{0, spec.size(rows_)};
  }

  int64_t rows_;
  int64_t heads_; // -1: none
  const Mesh& mesh_;
  SpecPtr query_;
  SpecPtr key_;
  bool causal_;
  AttentionTransport transport_;
  int64_t group_ = 1; // heads of the query for one of the key
  Placements query_placements_;
  Placements key_placements_;
  Axes ring_;
  bool merges_ = false;
};

} // namespace

AttentionLayouts plan_attention(
    const SpecPtr& query,
    const SpecPtr& key,
    const SpecPtr& value,
    const SpecPtr& mask,
    bool causal,
    int64_t bytes,
    AttentionTransport transport) {
  return Planner(query, key, causal, transport).plan(value, mask, bytes);
}

} // namespace shardtensor::detail
