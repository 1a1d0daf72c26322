#include "shardtensor/layout/infer.h"

#include <optional>

#include <c10/util/Exception.h>

#include "shardtensor/layout/print.h"

namespace shardtensor {

using namespace detail;
namespace {

std::vector<Placement> with_positive_dims(
    const char* op,
    std::vector<Placement> placements,
    int64_t dims) {
  for (Placement& placement : placements) {
    if (placement.is_shard()) {
      TORCH_CHECK_INDEX(
          placement.dim >= -dims && placement.dim < dims,
          op,
          ": ",
          placement,
          " of a tensor with ",
          dims,
          " dims");
      placement.dim += placement.dim < 0 ? dims : 0;
    }
  }
  return placements;
}

void check_placements(
    const char* op,
    const Mesh& mesh,
    const std::vector<Placement>& placements) {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(placements.size()) == mesh.axes(),
      op,
      ": placements (",
      join(placements),
      ") for ",
      mesh,
      ", expected one for each of its ",
      mesh.axes(),
      " axes");
}

void check_dims(const std::vector<std::vector<int64_t>>& local_sizes) {
  std::vector<int64_t> dims;
  for (const auto& sizes : local_sizes) {
    dims.push_back(static_cast<int64_t>(sizes.size()));
  }
  for (const int64_t one : dims) {
    TORCH_CHECK_VALUE(
        one == dims[0],
        "infer_spec: the local tensors have different numbers of dims, by "
        "rank: [",
        join(dims),
        "]");
  }
}

/// The extent of each piece that `axes` cut, given every position's.
std::vector<int64_t> extents_of_pieces(
    const Mesh& mesh,
    const std::vector<int64_t>& axes,
    int64_t dim,
    const std::vector<int64_t>& extents) {
  std::vector<std::optional<int64_t>> pieces(mesh.ranks(axes));
  for (size_t position = 0; position < extents.size(); ++position) {
    auto& piece = pieces[mesh.piece(static_cast<int64_t>(position), axes)];
    TORCH_CHECK_VALUE(
        piece.value_or(extents[position]) == extents[position],
        "infer_spec: dim ",
        dim,
        " must have one extent on all ranks that hold the same piece, but by "
        "rank it is [",
        join(extents),
        "]");
    piece = extents[position];
  }
  std::vector<int64_t> sizes;
  for (const auto& piece : pieces) {
    sizes.push_back(piece.value());
  }
  return sizes;
}

} // namespace

SpecPtr infer_spec(
    const MeshPtr& mesh,
    const std::vector<Placement>& placements,
    const std::vector<std::vector<int64_t>>& local_sizes) {
  TORCH_CHECK_VALUE(
      static_cast<int64_t>(local_sizes.size()) == mesh->ranks(),
      "infer_spec: the local sizes of ",
      local_sizes.size(),
      " ranks, expected those of all ",
      mesh->ranks());
  check_placements("infer_spec", *mesh, placements);
  check_dims(local_sizes);
  const auto dims = static_cast<int64_t>(local_sizes[0].size());
  const auto on_axes = with_positive_dims("infer_spec", placements, dims);
  std::vector<int64_t> sizes;
  ShardSpec::Partitions partitions;
  for (int64_t dim = 0; dim < dims; ++dim) {
    std::vector<int64_t> extents;
    for (const auto& local : local_sizes) {
      extents.push_back(local[dim]);
    }
    const auto axes = axes_of(on_axes, dim);
    const Partition partition(extents_of_pieces(*mesh, axes, dim, extents));
    sizes.push_back(partition.extent());
    partitions.push_back(partition); // dropped where no axis cuts
  }
  return make_spec(mesh, std::move(sizes), on_axes, std::move(partitions));
}

SpecPtr infer_spec_along_axes(
    const MeshPtr& mesh,
    const std::vector<Placement>& placements,
    const std::vector<int64_t>& local_sizes,
    const std::vector<std::vector<std::vector<int64_t>>>& along) {
  check_placements("from_local", *mesh, placements);
  const auto dims = static_cast<int64_t>(local_sizes.size());
  const auto on_axes = with_positive_dims("from_local", placements, dims);
  auto sizes = local_sizes;
  ShardSpec::Partitions partitions(dims);
  for (int64_t dim = 0; dim < dims; ++dim) {
    const auto axes = axes_of(on_axes, dim);
    if (axes.empty()) {
      continue;
    }
    TORCH_CHECK_VALUE(
        axes.size() == 1,
        "from_local: mesh dims [",
        join(axes),
        "] all shard dim ",
        dim,
        ": shapes along one of them do not say how it is cut; use "
        "sharding_shapes='infer'");
    const auto axis = axes[0];
    const auto given =
        axis < static_cast<int64_t>(along.size()) ? along[axis].size() : 0;
    TORCH_CHECK_VALUE(
        static_cast<int64_t>(given) == mesh->ranks(axis),
        "from_local: sharding_shapes[",
        axis,
        "]: expected ",
        mesh->ranks(axis),
        " shapes along mesh dim ",
        axis,
        ", got ",
        given);
    std::vector<int64_t> pieces;
    for (const auto& piece : along[axis]) {
      TORCH_CHECK_VALUE(
          dim < static_cast<int64_t>(piece.size()),
          "from_local: sharding_shapes[",
          axis,
          "] has the shape (",
          join(piece),
          "), expected one with dim ",
          dim);
      pieces.push_back(piece[dim]);
    }
    partitions[dim] = Partition(pieces);
    sizes[dim] = partitions[dim]->extent();
  }
  return make_spec(mesh, std::move(sizes), on_axes, std::move(partitions));
}

SpecPtr infer_even_spec(
    const MeshPtr& mesh,
    const std::vector<Placement>& placements,
    std::vector<int64_t> local_sizes) {
  check_placements("from_local", *mesh, placements);
  const auto on_axes = with_positive_dims(
      "from_local", placements, static_cast<int64_t>(local_sizes.size()));
  for (size_t axis = 0; axis < on_axes.size(); ++axis) {
    if (on_axes[axis].is_shard()) {
      local_sizes[on_axes[axis].dim] *= mesh->ranks(static_cast<int64_t>(axis));
    }
  }
  return make_spec(mesh, std::move(local_sizes), on_axes);
}

} // namespace shardtensor
