#pragma once

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

namespace shardtensor {

// Meshes of cells: points (N, D), D from 1 to 3, float or double, and cells (C,
// corners) of one kind, int64, rows of the points in the order of VTK and
// meshio: "line", "triangle", "quad", "tetra" or "hexahedron" with straight
// edges. A mesh of several kinds has a call for each. Values at points are (N)
// or (N, channels), linear (of quads and hexahedra multilinear) in between.
// Plain tensors or ShardTensors in any layout on one mesh of ranks; what is of
// cells lies as the cells do, what is of points as those values. Made of
// operators that ShardTensor has, so differentiable to any order in points and
// values. Communication: corners that other ranks have, each once, and for
// results at points their terms. Which ones is planned once for `cells`.
// Thread safety / ordering: as in primitives.h.
//
// Example: points (0, 0), (1, 0), (0, 1), the triangle 0, 1, 2: its measure is
// 1/2, its center (1/3, 1/3); values 0, 2, 3 have the gradient (2, 3).

/// Raises on all ranks, with the first such cell's number and corners, where a
/// cell names a point twice, or is flat or turned inside out anywhere because
/// its corners stand in a wrong order or a coordinate is NaN. Of surfaces in
/// space no side is the outer one: there all corners must turn alike. The other
/// functions take cells as they are. Communication: the corners that other
/// ranks have, and two reductions of a number.
void check_cells(
    const at::Tensor& points,
    const at::Tensor& cells,
    const std::string& kind);

/// Lengths, areas or volumes (C). Negative where a cell that fills its space (a
/// triangle in the plane, a tetrahedron) is turned inside out.
at::Tensor cell_measures(
    const at::Tensor& points,
    const at::Tensor& cells,
    const std::string& kind);

/// The mean of each cell's corners (C, D).
at::Tensor cell_centers(
    const at::Tensor& points,
    const at::Tensor& cells,
    const std::string& kind);

/// Of triangles and quads in space, the normals (C, 3), and of lines in the
/// plane, (C, 2): of length 1, or `weighted`, of the cell's area or length.
/// Corners turn left seen from their tip, a line's is at its right hand: what
/// `cell_faces` gives points out of the first cell.
at::Tensor cell_normals(
    const at::Tensor& points,
    const at::Tensor& cells,
    const std::string& kind,
    bool weighted = false);

/// Gradients of values at points, one for each cell, (C, D) or (C, channels,
/// D), along the cell where that is of fewer dims than its space:
///
/// - "green_gauss": the mean over the cell, by Gauss' theorem the integral of
///   values times normals over what bounds it;
/// - "least_squares": of the linear function that fits the corners' values.
///
/// On triangles and tetrahedra they are the same.
at::Tensor cell_gradients(
    const at::Tensor& points,
    const at::Tensor& cells,
    const std::string& kind,
    const at::Tensor& values,
    const std::string& method = "green_gauss");

/// The mass matrix of linear elements times values, without the matrix: row i
/// is the integral of shape function i times the values, times `coefficients`
/// (C) of the cells where they are given.
at::Tensor apply_mass(
    const at::Tensor& points,
    const at::Tensor& cells,
    const std::string& kind,
    const at::Tensor& values,
    const std::optional<at::Tensor>& coefficients = std::nullopt);

/// The stiffness matrix, alike: row i is the integral of the gradient of shape
/// function i times the values' gradient: minus the Laplacian.
at::Tensor apply_stiffness(
    const at::Tensor& points,
    const at::Tensor& cells,
    const std::string& kind,
    const at::Tensor& values,
    const std::optional<at::Tensor>& coefficients = std::nullopt);

} // namespace shardtensor
