#pragma once

#include <tuple>

#include <ATen/core/Tensor.h>

namespace shardtensor {

/// How far points (..., 3) are from a surface of triangles, negative inside:
/// distances (...), the nearest points on it (..., 3) and the faces those are
/// on (...), int64, of equally near ones the first. Beyond `max_dist` NaN, NaN
/// and -1. The surface is vertices (V, 3) and faces (F, 3) or (3 F), integers,
/// whose corners turn left seen from outside. Inside is where the nearest
/// face's (edge's, corner's) normal points away, or with
/// use_sign_winding_number where the surface winds around a point, which needs
/// no closed surface.
///
/// Plain tensors or ShardTensors on one mesh, float or double, on one device.
/// Results lie as the points do; the surface is gathered to all ranks.
/// Differentiable to any order in vertices and points (that of a distance of
/// zero is zero). The search is the host's: from another device vertices, faces
/// and points are copied there, each once, and what is found in three copies
/// back.
/// Communication: the gather, one number to agree that all coordinates are
/// finite; backward one sum of the vertices' gradients.
/// Thread safety / ordering: as in primitives.h.
/// Raises on all ranks: for shapes and dtypes that don't fit, corners out of
/// range, coordinates that are not finite, and max_dist < 0.
/// Source: Baerentzen and Aanaes 2005 (signs by normals); Barill et al. 2018
/// (winding numbers).
///
/// Example: a cube from 0 to 1, the point (0.5, 0.5, 0.75): -0.25, and (0.5,
/// 0.5, 1).
std::tuple<at::Tensor, at::Tensor, at::Tensor> signed_distance_field(
    const at::Tensor& mesh_vertices,
    const at::Tensor& mesh_indices,
    const at::Tensor& input_points,
    double max_dist = 1e8,
    bool use_sign_winding_number = false);

} // namespace shardtensor
