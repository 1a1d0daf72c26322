#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/layout/interval.h"

namespace shardtensor::detail {

/// A box of one side of an exchange, with the rank that it goes to or comes
/// from.
struct BoxOfPeer {
  int64_t peer = 0;
  const Box* box = nullptr;
  bool adds = false; // an earlier one writes some of it
};

/// How the boxes of one side are written, were it the target.
struct Writing {
  bool in_rank_order = false; // see MessageSide
  bool starts_at_zero = false;
};

/// Marks the boxes that add to what an earlier one wrote; none is empty, and
/// they stand by peer. The order is that of ranks, or this rank's own first.
/// Costs O(n log n) for n boxes: where many share elements and are not one and
/// the same, all of them add to zeros.
Writing plan_writing(
    std::vector<BoxOfPeer>& boxes,
    int64_t rank,
    const std::vector<int64_t>& sizes);

} // namespace shardtensor::detail
