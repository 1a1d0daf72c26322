#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/mesh.h"

namespace shardtensor::detail {

/// What a recursive bisection needs of this rank's points. Tensors are on CPUs.
struct Bisected {
  at::Tensor points; // (n, D), double, for the widest dim; or
  at::Tensor codes; // (n), int64: halved in this order; undefined: by points
  at::Tensor rows; // (n), int64, of the whole cloud: the order of equal ones
  at::Tensor weights; // (n), double, >= 0
};

/// The position in the mesh that gets each point: (n), int64. Ranks are halved
/// again and again, and with them the points, by weight. Does not depend on
/// where the points are now, but for the rounding of sums of weights.
/// Communication: some hundred all-reduces of a number for each part, for each
/// time that the ranks are halved.
/// Source: Berger and Bokhari 1987, recursive coordinate bisection.
at::Tensor bisect(const Bisected& given, const Mesh& mesh);

} // namespace shardtensor::detail
