#pragma once

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// Where each point (N, D) is along a Hilbert curve through the box from `low`
/// to `high` (each of D doubles, on the host): (N), int64. Points that are near
/// each other along the curve are near each other. The first eight dims count.
/// On CPUs, float or double. On PyTorch's threads.
at::Tensor hilbert_codes(
    const at::Tensor& points,
    const at::Tensor& low,
    const at::Tensor& high);

/// The order of a cloud's points along such a curve: (N), int64.
at::Tensor hilbert_order(const at::Tensor& points);

} // namespace shardtensor::detail
