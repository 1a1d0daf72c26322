#pragma once

#include "shardtensor/rules/attention/work.h"

namespace shardtensor::detail {

/// attend_all and attend_all_backward; of tensors that a compiler traces, as
/// one operator each, which contains its messages.
Attended run_attention(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    const AttentionWork& work);
AttentionGradients run_attention_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const at::Tensor& mask,
    const Attended& all,
    bool wants_mask,
    const AttentionWork& work);

} // namespace shardtensor::detail
