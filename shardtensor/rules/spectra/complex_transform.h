#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/interval.h"
#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

/// aten::_fft_c2c of `dims`, which are whole in the layout `at`. The tensor is
/// brought there before, and to `to` after.
struct ComplexTransform {
  SpecPtr at;
  SpecPtr to;
  std::vector<int64_t> dims;
  int64_t normalization;
  bool forward;
  /// What lies outside of it counts for nothing, if given.
  std::optional<Box> read = std::nullopt;
};

/// Above autograd; its gradient goes the same way back. Of a tensor, or a
/// gradient, that knows where it is zero (Note [Known zeros]) only the other
/// rows of dims that are not transformed are moved and transformed, where these
/// are half of them at most; of the gradient of such a tensor those alone, too,
/// where nobody reads the others. Communication: that of two redistributions.
at::Tensor complex_transform(
    const at::Tensor& x,
    const ComplexTransform& work,
    at::IntArrayRef strides = {});

} // namespace shardtensor::detail
