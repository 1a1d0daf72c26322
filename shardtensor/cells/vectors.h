#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardtensor::detail {

// Vectors of up to three components as one tensor for each, made of operators
// that ShardTensor has.
using Vector = std::array<at::Tensor, 3>; // components, each of one shape

at::Tensor dot(const Vector& a, const Vector& b);
Vector cross(const Vector& a, const Vector& b);
Vector over(const Vector& a, const at::Tensor& divisor);

/// From a last dim of up to three components; the others are zero.
Vector vector_of(const at::Tensor& x);
/// The first `dims` components as a last dim.
at::Tensor stacked(const Vector& a, int64_t dims);

/// What a map from the cell to space, given by the tangents along the cell's
/// own dims, does there: how it stretches, and the vectors whose products with
/// the tangents are 1 and 0.
struct Stretch {
  at::Tensor measure;
  std::vector<Vector> duals;
};

/// `space`: with signs where the tangents fill it.
Stretch stretch_of(const std::vector<Vector>& tangents, int64_t space);

/// Of symmetric matrices (C, D, D), D from 2 to 3, and right sides (C, D, X):
/// the solutions (C, D, X).
at::Tensor solved(const at::Tensor& matrices, const at::Tensor& rights);

/// While it lives coordinates keep their precision, which autocast would round:
/// differences of what is far from the origin.
class WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

/// A plain constant where x's operators take it, of its dtype.
at::Tensor constant_beside(const at::Tensor& x, const at::Tensor& constant);

} // namespace shardtensor::detail
