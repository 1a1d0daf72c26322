#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::testing {

// The oracle of exchanges: the whole tensor, cut by hand.

/// What `position` of `spec` holds of a whole tensor.
inline at::Tensor piece(
    const at::Tensor& whole,
    const ShardSpec& spec,
    int64_t position) {
  at::Tensor result = whole;
  const Box box = spec.box(position);
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    result = result.narrow(dim, box[dim].begin, box[dim].extent());
  }
  return result.contiguous();
}

inline at::Tensor piece(const at::Tensor& whole, const ShardSpec& spec) {
  return piece(whole, spec, spec.mesh()->position());
}

inline at::Tensor index_filled(c10::IntArrayRef sizes, at::ScalarType dtype) {
  int64_t numel = 1;
  for (const auto size : sizes) {
    numel *= size;
  }
  return at::arange(1, numel + 1, at::kDouble).view(sizes).to(dtype);
}

} // namespace shardtensor::testing
