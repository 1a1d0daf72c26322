#pragma once

#include <cstdint>

#include "shardtensor/rules/attention/transport.h"

namespace shardtensor::detail {

/// An attention whose rows are cut over the ranks of a group, as a choice of
/// transport sees it. Bytes, heads and batch are those of this rank.
struct AttentionSizes {
  int64_t ranks = 1;
  /// Those of the last mesh axis that cuts rows, where several do.
  int64_t last_ranks = 1;
  int64_t batch = 1;
  int64_t heads = 1; // of queries
  int64_t key_heads = 1;
  int64_t queries = 0; // rows of all ranks
  int64_t keys = 0;
  int64_t most_queries = 0; // rows of one rank
  int64_t most_keys = 0;
  int64_t features = 1;
  int64_t value_features = 1;
  int64_t bytes = 4; // of an element
  bool causal = false;
  /// A mask has rows of its own, which heads in their place would gather.
  bool has_mask_rows = false;
};

/// Seconds of the forward pass by a rough model: products of the busiest rank,
/// and messages that no product hides. Only the order counts.
double attention_cost(
    const AttentionSizes& sizes,
    AttentionTransport transport);

/// The cheapest; the ring where others are not cheaper, for it needs the least
/// memory. The same on all ranks.
AttentionTransport choose_transport(const AttentionSizes& sizes);

} // namespace shardtensor::detail
