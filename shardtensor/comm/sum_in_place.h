#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/mesh.h"

namespace shardtensor::detail {

/// The contiguous floating-point tensor x, which nobody else reads, becomes its
/// sum over mesh axes, without the copy that all_reduce makes. Not recorded.
/// Communication: that of all_reduce.
void sum_in_place(
    const at::Tensor& x,
    const Mesh& mesh,
    const std::vector<int64_t>& axes);

} // namespace shardtensor::detail
