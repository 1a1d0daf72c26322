#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shardtensor {

/// Neighbourhood attention of tensors (batch, dims..., heads, features) with
/// one, two or three dims: each query sees the kernel_size keys around it in
/// each dim, as NATTEN's na1d, na2d and na3d define it; at the ends of the
/// domain windows move inwards. Values may have other features than queries,
/// and fewer heads may serve several of the query's. One number stands for all
/// dims. `scale` is 1 / sqrt(features) by default. Plain tensors and
/// ShardTensors with any dims cut; the output lies as the query does, its
/// features whole. Differentiable to any order. Raises NATTEN's errors: windows
/// larger than the domain, kernels below 2, strides above the kernel.
/// Communication: the keys and values that a rank's windows name, one message
/// per rank that holds some; one for each of both where pieces are large and
/// cut along another dim than the first, or on a device. Source: Hassani et al.
/// 2023, Neighborhood Attention Transformer.
///
/// Example: of 8 rows with kernel 3, query 0 sees rows 0 to 2, query 3 rows 2
/// to 4; with dilation 2 rows 0, 2, 4, and 1, 3, 5.
at::Tensor neighborhood_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    c10::IntArrayRef kernel_size,
    c10::IntArrayRef dilation = 1,
    c10::IntArrayRef stride = 1,
    const std::vector<bool>& is_causal = {false},
    std::optional<double> scale = std::nullopt);

} // namespace shardtensor
