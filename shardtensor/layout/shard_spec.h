#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "shardtensor/layout/in_range.h"
#include "shardtensor/layout/interval.h"
#include "shardtensor/layout/mesh.h"
#include "shardtensor/layout/partition.h"
#include "shardtensor/layout/placement.h"

namespace shardtensor {

class ShardSpec;
/// Interned: two equal specs that are alive at the same time are the same
/// pointer, so that decisions are cached by address. Never null unless said.
using SpecPtr = std::shared_ptr<const ShardSpec>;

/// Everything about a sharded tensor but its data: global sizes, mesh, one
/// placement per mesh axis, one partition per sharded dim. Every rank's box is
/// known without communication. Several axes may shard one dim: its partition
/// then has a piece for each combination, row-major in axis order.
///
/// Example: sizes (10, 4) on a mesh of 2 x 2 with (Shard(0), Shard(0)) and the
/// partition {3, 3, 2, 2}: position 2, coordinates (1, 0), owns rows [6, 8).
class ShardSpec : public std::enable_shared_from_this<ShardSpec> {
 public:
  using Partitions = std::vector<std::optional<Partition>>;

  ShardSpec(
      MeshPtr mesh,
      std::vector<int64_t> sizes,
      std::vector<Placement> placements,
      Partitions partitions); // use make_spec

  const MeshPtr& mesh() const {
    return mesh_;
  }
  int64_t dim() const {
    return static_cast<int64_t>(sizes_.size());
  }
  const std::vector<int64_t>& sizes() const {
    return sizes_;
  }
  int64_t size(int64_t dim) const {
    return sizes_[checked(dim)];
  }
  int64_t numel() const;
  const std::vector<Placement>& placements() const {
    return placements_;
  }
  const Placement& placement(int64_t axis) const {
    return placements_[detail::in_range(
        "ShardSpec", "axis", axis, static_cast<int64_t>(placements_.size()))];
  }
  const Partitions& partitions() const {
    return partitions_;
  }
  bool is_sharded(int64_t dim) const {
    return partitions_[checked(dim)].has_value();
  }
  /// In one piece: not sharded, or by axes of one rank. So is a tensor without
  /// dims, whose `dim` is 0.
  bool is_whole(int64_t dim) const;
  /// Raises when the dim is not sharded.
  const Partition& partition(int64_t dim) const;
  /// The mesh axes that shard this dim, in order.
  const std::vector<int64_t>& axes(int64_t dim) const {
    return axes_[checked(dim)];
  }
  /// The mesh axes with a Shard placement, in order.
  std::vector<int64_t> sharded_axes() const;
  std::vector<int64_t> partial_axes() const;
  /// The dims with a partition, in order.
  std::vector<int64_t> sharded_dims() const;
  bool is_sharded() const {
    return is_sharded_;
  }
  bool has_partial() const {
    return has_partial_;
  }
  /// Every axis Replicate.
  bool is_replicated() const {
    return !is_sharded_ && !has_partial_;
  }
  /// No sharded dim has a repeated partition, see Note [Repeated partition].
  bool is_contiguous() const;
  /// Some rank holds nothing of a sharded dim.
  bool has_empty_piece() const;

  /// The piece of `dim` that position owns; 0 for a dim that is not sharded.
  int64_t piece(int64_t dim, int64_t position) const;
  /// What position owns of `dim`, within one repetition of its partition.
  Interval interval(int64_t dim, int64_t position) const;
  /// This rank's; {0, 0} when it is not in the mesh.
  Interval interval(int64_t dim) const;
  /// What position owns. Raises unless is_contiguous().
  Box box(int64_t position) const;
  std::vector<int64_t> local_sizes(int64_t position) const;
  /// This rank's; all zero extents when it is not in the mesh.
  const std::vector<int64_t>& local_sizes() const {
    return local_sizes_;
  }

  /// make_spec keeps the pointers of equal specs equal.
  bool operator==(const ShardSpec& other) const;

 private:
  int64_t checked(int64_t dim) const {
    return detail::in_range("ShardSpec", "dim", dim, this->dim());
  }

  MeshPtr mesh_;
  std::vector<int64_t> sizes_;
  std::vector<Placement> placements_;
  Partitions partitions_;
  std::vector<std::vector<int64_t>> axes_; // per dim
  std::vector<int64_t> local_sizes_;
  bool is_sharded_ = false;
  bool has_partial_ = false;
};

/// Normalizes negative shard dims, gives each sharded dim without a partition
/// torch.chunk's split, drops partitions of dims that no axis shards, checks
/// everything and interns. Raises when the number of placements is not the
/// mesh's number of axes, a shard dim is out of range, or a partition's extent
/// or number of pieces does not fit; says the value and what was expected.
SpecPtr make_spec(
    const MeshPtr& mesh,
    std::vector<int64_t> sizes,
    std::vector<Placement> placements,
    ShardSpec::Partitions partitions = {});

/// The same mesh and sizes, every axis Replicate.
SpecPtr replicated(const SpecPtr& spec);
SpecPtr make_replicated(const MeshPtr& mesh, std::vector<int64_t> sizes);
/// The same spec with each Partial axis made Replicate: the layout of a
/// gradient.
SpecPtr without_partial(const SpecPtr& spec);
/// Other placements. A dim that stays cut by the same axes keeps its partition;
/// `partitions` may give another one. Raises what make_spec does.
SpecPtr with_placements(
    const SpecPtr& spec,
    std::vector<Placement> placements,
    ShardSpec::Partitions partitions = {});
/// `dim` is no longer sharded: its axes become Replicate.
SpecPtr without_shard(const SpecPtr& spec, int64_t dim);
/// The same layout for other global sizes (same number of dims). Partitions of
/// dims whose extent is unchanged are kept, others are chunked anew.
SpecPtr with_sizes(const SpecPtr& spec, std::vector<int64_t> sizes);
/// The same axes, `dim` cut as `partition` says (its extent becomes the size).
/// Raises when `dim` is not sharded.
SpecPtr with_partition(const SpecPtr& spec, int64_t dim, Partition partition);
/// The layout of a tensor whose dims come from others: dim i has sizes[i] and
/// is cut as dim from[i] of `spec` is, or by `partitions[i]`, if given, along
/// the same axes; from[i] = -1: a new dim, whole. An axis that cuts a dim which
/// `from` does not name gets `on_dropped`; all other axes keep their placement.
/// Raises what make_spec does.
///
/// Example: sizes (4, 6), dim 1 cut as [4, 2]. with_dims(spec, {6, 1}, {1, -1})
/// has sizes (6, 1), dim 0 cut as [4, 2].
SpecPtr with_dims(
    const SpecPtr& spec,
    std::vector<int64_t> sizes,
    const std::vector<int64_t>& from,
    Placement on_dropped = Placement::replicate(),
    ShardSpec::Partitions partitions = {});

/// Live interned specs; for tests.
int64_t interned_specs();

/// "ShardSpec((10, 4) on Mesh(2): Shard(dim=0) [6, 4])".
std::string to_string(const ShardSpec& spec);
std::ostream& operator<<(std::ostream& out, const ShardSpec& spec);

} // namespace shardtensor
