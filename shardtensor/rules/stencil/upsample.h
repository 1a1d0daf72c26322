#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/halo/stencil.h"

namespace shardtensor::detail {

// PyTorch's own interpolation operators under one name.

using Scale = std::optional<double>;

/// One size and scale per trailing dim.
struct Upsample {
  const char* op;
  Resample::Mode mode;
  std::vector<int64_t> size;
  bool align_corners;
  std::vector<Scale> scales;

  int64_t dims() const {
    return static_cast<int64_t>(size.size());
  }
};

at::Tensor plain_upsample(const Upsample& u, const at::Tensor& x);

/// The gradient of an input of these sizes, for Linear and Cubic.
at::Tensor plain_upsample_backward(
    const Upsample& u,
    const at::Tensor& grad,
    at::IntArrayRef input_sizes);

} // namespace shardtensor::detail
