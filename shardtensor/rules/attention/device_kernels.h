#pragma once

#include <ATen/SDPBackend.h>

#include "shardtensor/rules/attention/block.h"

namespace shardtensor::detail {

// PyTorch's fused kernels of devices other than the CPU, those of them that
// give a log-sum-exp: flash, memory-efficient and cuDNN's attention. Masks in
// options are those to add, in the queries' dtype.

/// The one that PyTorch would take for tensors that are not cut, as its
/// switches (torch.nn.attention.sdpa_kernel) say; math where none takes these.
at::SDPBackend choose_kernel(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const BlockOptions& options,
    bool for_backward);

Attended attend_with(
    at::SDPBackend kernel,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const BlockOptions& options);

/// As attend_backward; log-sum-exps are finite.
BlockGradients attend_backward_with(
    at::SDPBackend kernel,
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const Attended& all,
    const BlockOptions& options);

} // namespace shardtensor::detail
