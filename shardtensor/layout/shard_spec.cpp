#include "shardtensor/layout/shard_spec.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <sstream>

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include "shardtensor/layout/intern.h"
#include "shardtensor/layout/print.h"

namespace shardtensor {

using namespace detail;

namespace {

// Never destroyed: specs may outlive the program's static objects.
InternTable<ShardSpec>& specs() {
  static auto* const specs = new InternTable<ShardSpec>();
  return *specs;
}

// ---- hash -------------------------------------------------------------------

size_t combine(size_t seed, int64_t value) {
  return c10::hash_combine(seed, std::hash<int64_t>()(value));
}

size_t combine(size_t seed, const std::vector<int64_t>& values) {
  seed = combine(seed, static_cast<int64_t>(values.size()));
  for (int64_t value : values) {
    seed = combine(seed, value);
  }
  return seed;
}

size_t hash_of(
    const MeshPtr& mesh,
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    const ShardSpec::Partitions& partitions) {
  size_t seed = combine(std::hash<MeshPtr>()(mesh), sizes);
  for (const Placement& placement : placements) {
    seed = combine(seed, static_cast<int64_t>(placement.kind));
    seed = combine(seed, placement.dim);
    seed = combine(seed, static_cast<int64_t>(placement.reduce));
  }
  for (const auto& partition : partitions) {
    if (partition) {
      seed = combine(seed, partition->repeat());
      seed = combine(seed, partition->offsets());
    }
  }
  return seed;
}

// ---- steps of make_spec -----------------------------------------------------

Placement normalized(const Placement& placement, int64_t dims) {
  switch (placement.kind) {
    case Placement::Kind::Replicate:
      return Placement::replicate();
    case Placement::Kind::Partial:
      return Placement::partial(placement.reduce);
    case Placement::Kind::Shard:
      break;
  }
  TORCH_CHECK_INDEX(
      dims > 0, "make_spec: ", placement, " of a tensor without dims");
  TORCH_CHECK_INDEX(
      placement.dim >= -dims && placement.dim < dims,
      "make_spec: ",
      placement,
      " of a tensor with ",
      dims,
      " dims, expected a dim from ",
      -dims,
      " to ",
      dims - 1);
  return Placement::shard(
      placement.dim < 0 ? placement.dim + dims : placement.dim);
}

void check_sizes(const std::vector<int64_t>& sizes) {
  for (int64_t size : sizes) {
    TORCH_CHECK_VALUE(
        size >= 0,
        "make_spec: size ",
        size,
        " in (",
        join(sizes),
        "), expected at least 0");
  }
}

std::vector<Placement> normalize(
    const Mesh& mesh,
    std::vector<Placement> placements,
    int64_t dims) {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(placements.size()) == mesh.axes(),
      "make_spec: ",
      placements.size(),
      " placements (",
      join(placements),
      ") for ",
      mesh,
      ", expected one for each of its ",
      mesh.axes(),
      " axes");
  for (Placement& placement : placements) {
    placement = normalized(placement, dims);
  }
  return placements;
}

/// The ranks of each axis that shards `dim`.
std::vector<int64_t> ranks_sharding(
    const Mesh& mesh,
    const std::vector<Placement>& placements,
    int64_t dim) {
  auto ranks = axes_of(placements, dim);
  for (auto& axis : ranks) {
    axis = mesh.ranks(axis);
  }
  return ranks;
}

void check_partition(
    const Partition& partition,
    int64_t dim,
    int64_t size,
    int64_t pieces) {
  TORCH_CHECK_VALUE(
      partition.pieces() == pieces,
      "make_spec: partition ",
      partition,
      " of dim ",
      dim,
      " has ",
      partition.pieces(),
      " pieces, expected ",
      pieces);
  TORCH_CHECK_VALUE(
      partition.extent() == size,
      "make_spec: partition ",
      partition,
      " of dim ",
      dim,
      " has extent ",
      partition.extent(),
      ", expected ",
      size);
}

ShardSpec::Partitions complete(
    const Mesh& mesh,
    const std::vector<int64_t>& sizes,
    const std::vector<Placement>& placements,
    ShardSpec::Partitions partitions) {
  TORCH_CHECK_VALUE(
      partitions.empty() || partitions.size() == sizes.size(),
      "make_spec: ",
      partitions.size(),
      " partitions, expected none or one for each of ",
      sizes.size(),
      " dims");
  partitions.resize(sizes.size());
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    const std::vector<int64_t> ranks = ranks_sharding(mesh, placements, dim);
    auto& partition = partitions[dim];
    if (ranks.empty()) {
      partition.reset();
    } else if (!partition) {
      partition = Partition::chunked(sizes[dim], ranks);
    } else {
      const int64_t pieces = std::accumulate(
          ranks.begin(), ranks.end(), int64_t{1}, std::multiplies<>());
      check_partition(*partition, dim, sizes[dim], pieces);
    }
  }
  return partitions;
}

} // namespace

// ---- ShardSpec --------------------------------------------------------------

ShardSpec::ShardSpec(
    MeshPtr mesh,
    std::vector<int64_t> sizes,
    std::vector<Placement> placements,
    Partitions partitions)
    : mesh_(std::move(mesh)),
      sizes_(std::move(sizes)),
      placements_(std::move(placements)),
      partitions_(std::move(partitions)),
      axes_(sizes_.size()),
      local_sizes_(sizes_.size(), 0) {
  for (int64_t axis = 0; axis < mesh_->axes(); ++axis) {
    const Placement& placement = placements_[axis];
    has_partial_ |= placement.is_partial();
    if (placement.is_shard()) {
      is_sharded_ = true;
      axes_[placement.dim].push_back(axis);
    }
  }
  if (mesh_->contains_this_rank()) {
    local_sizes_ = local_sizes(mesh_->position());
  }
}

int64_t ShardSpec::numel() const {
  return std::accumulate(
      sizes_.begin(), sizes_.end(), int64_t{1}, std::multiplies<>());
}

bool ShardSpec::is_whole(int64_t dim) const {
  return sizes_.empty() || mesh_->ranks(axes(dim)) == 1;
}

const Partition& ShardSpec::partition(int64_t dim) const {
  const auto& partition = partitions_[checked(dim)];
  TORCH_CHECK_VALUE(
      partition,
      "ShardSpec: dim ",
      dim,
      " of ",
      *this,
      " has no partition, expected a sharded dim");
  return *partition;
}

std::vector<int64_t> ShardSpec::sharded_axes() const {
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < mesh_->axes(); ++axis) {
    if (placements_[axis].is_shard()) {
      axes.push_back(axis);
    }
  }
  return axes;
}

std::vector<int64_t> ShardSpec::partial_axes() const {
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < mesh_->axes(); ++axis) {
    if (placements_[axis].is_partial()) {
      axes.push_back(axis);
    }
  }
  return axes;
}

std::vector<int64_t> ShardSpec::sharded_dims() const {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < this->dim(); ++dim) {
    if (is_sharded(dim)) {
      dims.push_back(dim);
    }
  }
  return dims;
}

bool ShardSpec::has_empty_piece() const {
  return std::ranges::any_of(partitions_, [](const auto& partition) {
    return partition && partition->has_empty_piece();
  });
}

bool ShardSpec::is_contiguous() const {
  for (const auto& partition : partitions_) {
    if (partition && !partition->is_contiguous()) {
      return false;
    }
  }
  return true;
}

int64_t ShardSpec::piece(int64_t dim, int64_t position) const {
  return mesh_->piece(position, axes(dim));
}

Interval ShardSpec::interval(int64_t dim, int64_t position) const {
  const auto& partition = partitions_[checked(dim)];
  return partition ? partition->interval(piece(dim, position))
                   : Interval{0, sizes_[dim]};
}

Interval ShardSpec::interval(int64_t dim) const {
  return mesh_->contains_this_rank() ? interval(dim, mesh_->position())
                                     : Interval{};
}

Box ShardSpec::box(int64_t position) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_contiguous(),
      "ShardSpec: a rank owns several boxes of ",
      *this,
      ", expected contiguous partitions");
  Box box;
  box.reserve(sizes_.size());
  for (int64_t dim = 0; dim < this->dim(); ++dim) {
    box.push_back(interval(dim, position));
  }
  return box;
}

std::vector<int64_t> ShardSpec::local_sizes(int64_t position) const {
  std::vector<int64_t> local(sizes_.size());
  for (int64_t dim = 0; dim < this->dim(); ++dim) {
    const auto& partition = partitions_[dim];
    local[dim] =
        partition ? partition->local_extent(piece(dim, position)) : sizes_[dim];
  }
  return local;
}

bool ShardSpec::operator==(const ShardSpec& other) const {
  return mesh_ == other.mesh_ && sizes_ == other.sizes_ &&
      placements_ == other.placements_ && partitions_ == other.partitions_;
}

// ---- make_spec and its relatives --------------------------------------------

SpecPtr make_spec(
    const MeshPtr& mesh,
    std::vector<int64_t> sizes,
    std::vector<Placement> placements,
    ShardSpec::Partitions partitions) {
  TORCH_CHECK_VALUE(mesh, "make_spec: no mesh, expected one");
  check_sizes(sizes);
  placements = normalize(*mesh, std::move(placements), sizes.size());
  partitions = complete(*mesh, sizes, placements, std::move(partitions));
  return specs().get(
      hash_of(mesh, sizes, placements, partitions),
      [&](const ShardSpec& spec) {
        return spec.mesh() == mesh && spec.sizes() == sizes &&
            spec.placements() == placements && spec.partitions() == partitions;
      },
      [&] {
        return std::make_unique<const ShardSpec>(
            mesh,
            std::move(sizes),
            std::move(placements),
            std::move(partitions));
      });
}

SpecPtr replicated(const SpecPtr& spec) {
  return spec->is_replicated() ? spec
                               : make_replicated(spec->mesh(), spec->sizes());
}

SpecPtr make_replicated(const MeshPtr& mesh, std::vector<int64_t> sizes) {
  TORCH_CHECK_VALUE(mesh, "make_replicated: no mesh, expected one");
  return make_spec(
      mesh, std::move(sizes), std::vector<Placement>(mesh->axes()));
}

SpecPtr without_partial(const SpecPtr& spec) {
  if (!spec->has_partial()) {
    return spec;
  }
  std::vector<Placement> placements = spec->placements();
  for (Placement& placement : placements) {
    if (placement.is_partial()) {
      placement = Placement::replicate();
    }
  }
  return make_spec(
      spec->mesh(), spec->sizes(), std::move(placements), spec->partitions());
}

SpecPtr with_placements(
    const SpecPtr& spec,
    std::vector<Placement> placements,
    ShardSpec::Partitions partitions) {
  const auto& mesh = *spec->mesh();
  placements = normalize(mesh, std::move(placements), spec->dim());
  if (partitions.empty()) {
    partitions.resize(spec->dim());
  }
  const bool complete = partitions.size() == spec->sizes().size();
  for (const int64_t dim : spec->sharded_dims()) {
    if (complete && !partitions[dim] &&
        axes_of(placements, dim) == spec->axes(dim)) {
      partitions[dim] = spec->partition(dim);
    }
  }
  return make_spec(
      spec->mesh(),
      spec->sizes(),
      std::move(placements),
      std::move(partitions));
}

SpecPtr without_shard(const SpecPtr& spec, int64_t dim) {
  TORCH_CHECK_INDEX(
      dim >= 0 && dim < spec->dim(),
      "without_shard: dim ",
      dim,
      ", expected 0 <= dim < ",
      spec->dim());
  if (!spec->is_sharded(dim)) {
    return spec;
  }
  std::vector<Placement> placements = spec->placements();
  for (int64_t axis : spec->axes(dim)) {
    placements[axis] = Placement::replicate();
  }
  return make_spec(
      spec->mesh(), spec->sizes(), std::move(placements), spec->partitions());
}

SpecPtr with_sizes(const SpecPtr& spec, std::vector<int64_t> sizes) {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(sizes.size()) == spec->dim(),
      "with_sizes: sizes (",
      join(sizes),
      ") for ",
      *spec,
      ", expected ",
      spec->dim(),
      " dims");
  ShardSpec::Partitions partitions = spec->partitions();
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    if (sizes[dim] != spec->size(dim)) {
      partitions[dim].reset();
    }
  }
  return make_spec(
      spec->mesh(),
      std::move(sizes),
      spec->placements(),
      std::move(partitions));
}

SpecPtr with_partition(const SpecPtr& spec, int64_t dim, Partition partition) {
  TORCH_CHECK_VALUE(
      dim >= 0 && dim < spec->dim() && spec->is_sharded(dim),
      "with_partition: dim ",
      dim,
      " of ",
      *spec,
      ", expected a sharded dim");
  std::vector<int64_t> sizes = spec->sizes();
  ShardSpec::Partitions partitions = spec->partitions();
  sizes[dim] = partition.extent();
  partitions[dim] = std::move(partition);
  return make_spec(
      spec->mesh(),
      std::move(sizes),
      spec->placements(),
      std::move(partitions));
}

SpecPtr with_dims(
    const SpecPtr& spec,
    std::vector<int64_t> sizes,
    const std::vector<int64_t>& from,
    Placement on_dropped,
    ShardSpec::Partitions partitions) {
  TORCH_CHECK_VALUE(
      from.size() == sizes.size(),
      "with_dims: dims (",
      join(from),
      ") for sizes (",
      join(sizes),
      "), expected as many");
  std::vector<Placement> placements = spec->placements();
  for (Placement& placement : placements) {
    if (placement.is_shard()) {
      placement = on_dropped;
    }
  }
  partitions.resize(sizes.size());
  for (size_t dim = 0; dim < from.size(); ++dim) {
    if (from[dim] < 0 || !spec->is_sharded(from[dim])) {
      continue;
    }
    for (const int64_t axis : spec->axes(from[dim])) {
      placements[axis] = Placement::shard(static_cast<int64_t>(dim));
    }
    if (!partitions[dim]) {
      partitions[dim] = spec->partition(from[dim]);
    }
  }
  return make_spec(
      spec->mesh(),
      std::move(sizes),
      std::move(placements),
      std::move(partitions));
}

int64_t interned_specs() {
  return specs().size();
}

// ---- printing ---------------------------------------------------------------

std::string to_string(const ShardSpec& spec) {
  std::ostringstream out;
  out << spec;
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const ShardSpec& spec) {
  out << "ShardSpec((" << join(spec.sizes()) << ") on " << *spec.mesh() << ": ";
  for (int64_t axis = 0; axis < spec.mesh()->axes(); ++axis) {
    const Placement& placement = spec.placement(axis);
    out << (axis == 0 ? "" : ", ") << placement;
    // A dim's partition follows the last axis that shards it.
    if (placement.is_shard() && spec.axes(placement.dim).back() == axis) {
      out << ' ' << spec.partition(placement.dim);
    }
  }
  return out << ')';
}

} // namespace shardtensor
