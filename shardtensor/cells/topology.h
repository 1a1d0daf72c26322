#pragma once

#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor {

// What the cells of a mesh share. Cells come in blocks of one kind, (C,
// corners), int64, as in elements.h: rows of `points` points; cells are
// numbered block after block. Plain tensors or ShardTensors in any layout on
// one mesh of ranks; no rank holds all: an edge or a face is worked on where
// its corners say. Results of cut cells are cut by all axes, in like numbers;
// they are those of one device. Raises on all ranks for corners out of range.
// Communication: each rank's different edges or faces once, a few numbers for
// each. Thread safety / ordering: as in primitives.h.

/// The edges of all cells, each once: (2, E), the lower row first, in ascending
/// order.
///
/// Example: the triangles 0, 1, 2 and 2, 1, 3: {{0, 0, 1, 1, 2}, {1, 2, 2, 3,
/// 3}}.
at::Tensor cell_edges(
    const std::vector<at::Tensor>& cells,
    const std::vector<std::string>& kinds,
    int64_t points);

/// What bounds the cells, which all have as many dims: the edges of triangles
/// and quads, the sides of tetrahedra and hexahedra. Each once, in ascending
/// order of sorted corners: faces (F, corners), -1 behind those with fewer, as
/// the first cell has them, seen from its outside; and the cells on either side
/// (F, 2), of the lower number first, -1 where there is no second. Raises where
/// more than two cells share a face.
///
/// Example: the triangles 0, 1, 2 and 2, 1, 3: faces {0, 1}, {2, 0}, {1, 2},
/// {1, 3}, {3, 2}, cells {0, -1}, {0, -1}, {0, 1}, {1, -1}, {1, -1}.
std::tuple<at::Tensor, at::Tensor> cell_faces(
    const std::vector<at::Tensor>& cells,
    const std::vector<std::string>& kinds,
    int64_t points);

} // namespace shardtensor
