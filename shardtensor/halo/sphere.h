#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// Rows beyond the sides of a latitude-longitude grid, which go on around the
/// sphere: longitude wraps, and beyond a pole lies the row half a turn away.
struct SphereHalo {
  /// Rows on each side, along latitude and along longitude.
  std::array<int64_t, 2> width = {1, 1};
  /// Latitude and longitude.
  std::array<int64_t, 2> dims = {-2, -1};
  /// Components of a vector field: east and north turn round beyond a pole, so
  /// their signs change there.
  bool vector = false;
  /// The first and last row are the poles, and beyond one lies the second row
  /// again; else rows lie between the poles.
  bool pole_rows = false;
};

/// `x`, plain or a ShardTensor with any dims cut, in any pieces, with the rows
/// beyond all four sides: sizes grow by 2 * width. The ranks with the outermost
/// rows get those beyond. Differentiable to any order. Communication: for each
/// of both dims that has a width, the rows beyond travel to these ranks (more
/// where longitude is cut, for half a turn is another rank's), nothing else.
/// Raises for one dim named twice, a negative width, one of more rows than
/// there are, and an odd number of columns, of which there is no half turn.
///
/// Example: columns a, b, c, d and a width of 1: above the first row of values
/// 1, 2, 3, 4 stands 3, 4, 1, 2, and each row begins with its last value.
at::Tensor pad_sphere(const at::Tensor& x, const SphereHalo& halo);

/// halo_exchange (halo_exchange.h) around the sphere: this rank's shard of `x`
/// with `width` ghost cells on all sides, a plain tensor. Communication: that
/// of pad_sphere, and one message per rank that has ghost cells of ours.
at::Tensor halo_exchange_on_sphere(const at::Tensor& x, const SphereHalo& halo);

/// The inverse: drops the ghost cells of `local` and returns the ShardTensor,
/// laid out as halo_trim says of `like`, whose shards are left. No
/// communication.
at::Tensor halo_trim_on_sphere(
    const at::Tensor& local,
    const SpecPtr& like,
    const SphereHalo& halo);

} // namespace shardtensor
