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
  /// These are all keys: the log_sum is for backward alone, and may be any
  /// where a query has no weights.
  bool all_keys = false;
};

struct Keys {
  at::Tensor key;
  at::Tensor value;
};

/// The log_sum in fp32, or fp64 for fp64; where the mask hides all keys,
/// counted from its largest value.
Attended attend(
    const at::Tensor& query,
    const Keys& keys,
    const BlockOptions& options);

/// What gradients come from, besides keys.
struct AttendedQueries {
  at::Tensor query;
  Attended all; // to the keys of all blocks
  at::Tensor grad; // of all.output
};

struct AttentionGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor mask; // undefined unless wanted
};

/// What the block contributes to the gradients. The mask's is that of the
/// scores: broadcasts are not summed.
AttentionGradients attend_backward(
    const AttendedQueries& queries,
    const Keys& keys,
    bool wants_mask,
    const BlockOptions& options);

} // namespace shardtensor::detail
