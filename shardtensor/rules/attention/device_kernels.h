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
    const Keys& keys,
    const BlockOptions& options,
    bool for_backward);

Attended attend_with(
    at::SDPBackend kernel,
    const at::Tensor& query,
    const Keys& keys,
    const BlockOptions& options);

/// As attend_backward; log-sum-exps are finite.
AttentionGradients attend_backward_with(
    at::SDPBackend kernel,
    const AttendedQueries& queries,
    const Keys& keys,
    const BlockOptions& options);

} // namespace shardtensor::detail
