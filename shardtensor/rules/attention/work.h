#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/attention/block.h"
#include "shardtensor/rules/attention/rows.h"

namespace shardtensor::detail {

// What a rank does in an attention whose keys are cut along the sequence: local
// tensors of 4 dims, see block.h.

/// How queries and keys of different ranks meet.
enum class Meeting {
  /// Every rank has all the keys that its queries see.
  Here,
  /// Blocks of keys pass all ranks while those compute with the one before.
  Ring,
  /// Every rank gets all keys at once.
  AllGather,
  /// Every rank has all queries: it attends to its own keys, and the results
  /// are merged.
  Merge,
};

struct AttentionWork {
  Meeting meeting = Meeting::Here;
  bool causal = false;
  /// Queries and keys go to other ranks first, so that a causal mask leaves
  /// each the same work.
  bool balanced = false;
  double scale = 1;
  AttentionDropout dropout;
  int64_t rank = 0; // in the group
  std::vector<Rows> queries; // of every rank of the group
  std::vector<Rows> keys;
  std::string group; // "" for Meeting::Here
};

/// `mask` is that of this rank's queries. Communication: none, one tour, one
/// exchange, or one exchange and an all-reduce, by the meeting; balanced, an
/// exchange for each tensor besides.
Attended attend_all(
    const at::Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work);

/// Complete but for Meeting::Merge, where the query's is this rank's term. The
/// mask's is of mask's sizes.
AttentionGradients attend_all_backward(
    const AttendedQueries& queries,
    const Keys& keys,
    const Mask& mask,
    bool wants_mask,
    const AttentionWork& work);

} // namespace shardtensor::detail
