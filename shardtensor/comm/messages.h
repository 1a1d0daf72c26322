#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardtensor/comm/group.h"
#include "shardtensor/layout/placement.h"

namespace shardtensor::detail {

// Note [Neighbours]
// An all-to-all takes a number for every rank of the group. In large groups
// where ranks have few peers, messages go to and from these alone.

// Note [Queues]
// NCCL and its like put a call into a queue of the device: no wait holds up the
// host, and one with a time limit would, for it polls. A call that nothing runs
// beside is done where the caller's kernels are, without events. Messages that
// start together travel together, so peers alone are written to whenever there
// are fewer of them than ranks: an empty message costs as much as a short one,
// and the first to a rank makes buffers for it. Where each rank gets what all
// have, in order, one call brings it: no message to each is packed.

// Note [Messages over gloo]
// gloo hands its collectives to a thread of its own, and every step of a
// message wakes one thread or another. Its all-to-all has a message for every
// rank, empty or not, its all-reduce two rounds. That is right for large
// tensors and few ranks: this thread computes meanwhile. Otherwise messages to
// and from the peers alone, started by this thread, take less time.

/// A call under way; `peer` is the rank that a message is to or from.
struct PeerWork {
  c10::intrusive_ptr<c10d::Work> work;
  int64_t peer = -1; // all ranks
};
using Works = std::vector<PeerWork>;

/// What goes to, or comes from, one rank.
struct RankTensor {
  int64_t rank;
  at::Tensor tensor;
};
using RankTensors = std::vector<RankTensor>;

/// See Note [Queues].
bool is_queued(c10d::ProcessGroup& group, const at::Tensor& x);

/// For moving data; the answer is the same on all ranks.
bool prefers_messages(
    c10d::ProcessGroup& group,
    const at::Tensor& x,
    Traffic traffic);

/// For an x of every rank on each of them, or its reduction.
bool prefers_messages_of_all(c10d::ProcessGroup& group, const at::Tensor& x);

/// One message to and from each of these ranks, on x's device; none is empty,
/// and none goes to this rank. All ranks of the group call it. Where one cannot
/// be started, the others are before its error is raised.
Works start_messages(
    c10d::ProcessGroup& group,
    const at::Tensor& x,
    const RankTensors& out,
    const RankTensors& in);

/// x becomes the reduction of the rows, in the order of the ranks: every rank
/// gets the same bits.
void reduce_rows(
    const at::Tensor& x,
    const std::vector<at::Tensor>& rows,
    Reduce reduce);

} // namespace shardtensor::detail
