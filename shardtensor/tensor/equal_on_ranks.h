#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/mesh.h"

namespace shardtensor::detail {

// Note [Equal on devices]
// What all ranks compute alike has the same bits on CPUs. Kernels of devices
// add in any order, and are chosen by each rank for itself: parameters whose
// gradients are computed, not sent, come apart by rounding errors, which
// sync_module_over_mesh takes back.

/// Whether ranks that differ in `axes` alone hold other bits of a tensor of the
/// same sizes and dtype; on devices, other numbers. The same answer on every
/// rank of the mesh. Communication: two all-reduces over the axes, and one of a
/// number where they are not all.
bool differs_along(
    const at::Tensor& tensor,
    const Mesh& mesh,
    const std::vector<int64_t>& axes);

} // namespace shardtensor::detail
