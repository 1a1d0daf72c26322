#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/attention/dropout.h"

namespace shardtensor::detail {

// Attention written with PyTorch's operators on ShardTensors, all scores at
// once: differentiable to any order and in forward mode. The mask is bool, or
// added, and may be undefined.

struct AttentionOperands {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor mask;
};

/// The softmax of the scores; 0 in the rows of queries that see no key.
at::Tensor attention_weights(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& mask,
    bool causal,
    double scale);

/// Where `dropout` has a key, weights are dropped.
at::Tensor attention_by_scores(
    const AttentionOperands& operands,
    bool causal,
    double scale,
    const AttentionDropout& dropout);

/// The gradients of its operands; the mask's is undefined unless wanted.
AttentionOperands attention_gradients_by_scores(
    const at::Tensor& grad,
    const AttentionOperands& operands,
    bool wants_mask,
    bool causal,
    double scale,
    const AttentionDropout& dropout);

} // namespace shardtensor::detail
