#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shardtensor/layout/mesh.h"
#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// Which axis of `whole` each axis of `part` is: the one along which this rank
/// sees the same ranks, in the same order of axes. Nothing where there is no
/// such axis, or where this rank is not in both meshes.
///
/// Example: on rank 2 of a 2 x 2 mesh the ranks {2, 3} are axis 1, the ranks
/// {0, 2} axis 0, the ranks {1, 2} none.
std::optional<std::vector<int64_t>> axes_in(
    const Mesh& part,
    const Mesh& whole);

/// The same pieces, seen from a mesh of which the spec's own has some axes:
/// Replicate along the others. Raises when it has not.
SpecPtr on_mesh(const SpecPtr& spec, const MeshPtr& mesh);

namespace detail {

/// The ranks along the axis of this name, this one among them. Raises for
/// another name, and where this rank is not in the mesh.
MeshPtr axis_mesh(const Mesh& mesh, const std::string& name);

/// The process group of the ranks that `axes` join, in the order of the pieces
/// that these cut: one axis, or all of them; others have none.
std::optional<std::string> group_of(
    const Mesh& mesh,
    const std::vector<int64_t>& axes);

} // namespace detail

} // namespace shardtensor
