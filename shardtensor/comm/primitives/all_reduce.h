#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/mesh.h"
#include "shardtensor/layout/placement.h"

namespace shardtensor {

/// The reduction of every rank's `x` (same shape and dtype on all), the same
/// on every rank. Communication: one all-reduce of x.numel() elements. The
/// adjoint of a sum is a sum, of an average an average; max, min and product
/// are not differentiable (they raise in backward). fp16 and bf16 sums travel
/// as they are. A group of one returns x itself.
at::Tensor all_reduce(
    const at::Tensor& x,
    Reduce reduce,
    const std::string& group);

/// all_reduce over several mesh axes: one call when they are all of the mesh's
/// axes, else one per axis. No axes: x itself.
at::Tensor all_reduce(
    const at::Tensor& x,
    Reduce reduce,
    const Mesh& mesh,
    const std::vector<int64_t>& axes);

} // namespace shardtensor
