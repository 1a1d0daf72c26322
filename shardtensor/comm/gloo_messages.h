#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardtensor/layout/placement.h"

namespace shardtensor::detail {

// Note [Messages over gloo]
// gloo hands its collectives to a thread of its own, and every step of a
// message wakes one thread or another. Its all-to-all has a message for every
// rank, empty or not, its all-reduce two rounds. That is right for large
// tensors and few ranks: this thread computes meanwhile. Otherwise messages to
// and from the peers alone, started by this thread, take less time.

using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
/// A tensor for each rank.
using RankTensors = std::vector<at::Tensor>;

/// For moving data of which no two ranks exchange more than `largest` bytes.
bool prefers_messages(
    c10d::ProcessGroup& group,
    const at::Tensor& x,
    int64_t largest);

/// For the reduction of x.
bool prefers_reduced_messages(c10d::ProcessGroup& group, const at::Tensor& x);

/// One message to and from each other rank that gets or sends something.
Works start_messages(
    c10d::ProcessGroup& group,
    const RankTensors& out,
    const RankTensors& in);

/// x becomes the reduction of the rows, in the order of the ranks: every rank
/// gets the same bits.
void reduce_rows(const at::Tensor& x, const RankTensors& rows, Reduce reduce);

} // namespace shardtensor::detail
