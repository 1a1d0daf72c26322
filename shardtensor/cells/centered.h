#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor {

/// Gradients of values that belong to cells, one for each cell, (C, D) or (C,
/// channels, D), from the cells across its faces. Points, cells in blocks of
/// one kind and their numbers are those of elements.h and topology.h, `faces`
/// and `sides` what cell_faces gives for the cells, values (C) or (C, channels)
/// what cell_centers has them at. Cells fill their space, of two or three dims.
///
/// - "least_squares": of the linear function that fits the differences to the
///   neighbours, each weighted by its distance to the power -2. Exact for
///   linear values; where the neighbours' directions leave a direction open (up
///   to rounding), the gradient along it is zero;
/// - "green_gauss": by Gauss' theorem the sum of the faces' values times their
///   area vectors over the volume. A face's value lies between those of its
///   cells as its center does along its normal: exact for linear values where
///   the lines between centers meet the faces' centers.
///
/// `boundary_values`, (F) or (F, channels), are those at the centers of faces
/// with one cell; others are not read. Without them least squares leaves these
/// faces out and Green-Gauss takes the cell's value.
///
/// Plain tensors or ShardTensors in any layout on one mesh of ranks; results
/// lie as the cells do. Differentiable to any order in points and values.
/// Communication: corners and cells that other ranks have, each once, and the
/// faces' terms; which ones is planned once for `faces` and `sides`. Raises on
/// all ranks for what doesn't fit. Thread safety / ordering: as in
/// primitives.h.
///
/// Example: the unit squares from x = 0 to 3 in a row with values 1, 3, 5: the
/// gradient is (2, 0) by least squares; by Green-Gauss, (1, 0) at both ends.
at::Tensor cell_centered_gradients(
    const at::Tensor& points,
    const std::vector<at::Tensor>& cells,
    const std::vector<std::string>& kinds,
    const at::Tensor& faces,
    const at::Tensor& sides,
    const at::Tensor& values,
    const std::string& method = "least_squares",
    const std::optional<at::Tensor>& boundary_values = std::nullopt);

} // namespace shardtensor
