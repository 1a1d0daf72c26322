#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/attention/dropout.h"
#include "shardtensor/rules/attention/mask.h"
#include "shardtensor/rules/attention/merge.h"

namespace shardtensor::detail {

// Attention of local queries to a block of local keys. Queries, keys and values
// are (batch, heads, rows, features), all of them with elements; keys may have
// fewer heads, each of which serves as many heads of queries. PyTorch's kernel
// that gives a log-sum-exp does the work; what it doesn't take is computed from
// scores, some rows at a time.

/// Weights that are dropped: those of these rows and columns of all.
struct BlockDropout {
  AttentionDropout all;
  Interval rows;
  Interval columns;
};

struct BlockOptions {
  /// The i-th query sees the first i + 1 keys. Never beside a mask.
  bool causal = false;
  double scale = 1;
  /// Added to the scores, or bool, true where a query sees a key; broadcasts
  /// to (batch, heads, queries, keys). May be undefined.
  at::Tensor mask;
  std::optional<BlockDropout> dropout = std::nullopt;
  /// Those of the whole mask, see Note [Rows that hide all keys].
  HiddenRows hidden = {};
};

/// The log_sum in fp32, or fp64 for fp64; where the mask hides all keys,
/// counted from its largest value.
Attended attend(
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const BlockOptions& options);

struct BlockGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor mask; // of the scores, where wanted: broadcasts are not summed
};

/// What the block contributes to the gradients. `all` is the attention to the
/// keys of all blocks, `grad` its output's gradient.
BlockGradients attend_backward(
    const at::Tensor& grad,
    const at::Tensor& query,
    const at::Tensor& key,
    const at::Tensor& value,
    const Attended& all,
    bool wants_mask,
    const BlockOptions& options);

} // namespace shardtensor::detail
