#pragma once

#include "shardtensor/rules/attention/meet.h"

namespace shardtensor::detail {

// The ways in which queries meet the keys of all ranks, see Meeting. In
// backward they give the gradients of this rank's keys and add to those of its
// queries.

/// The extent of a sequence that the ranks hold together.
int64_t whole_extent(const std::vector<Rows>& ranks);

/// Gives every rank the rows that `to` names: one exchange.
at::Tensor move_rows(
    const at::Tensor& x,
    const std::vector<Rows>& from,
    const std::vector<Rows>& to,
    const AttentionWork& work);

using MeetKeys = Attended(
    const at::Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work);
using MeetKeysBackward =
    Keys(Queries& queries, const Keys& keys, const AttentionWork& work);

MeetKeys attend_here;
MeetKeysBackward backward_here;

MeetKeys attend_in_ring;
MeetKeysBackward ring_backward;

MeetKeys attend_to_gathered;
MeetKeysBackward gathered_backward;

MeetKeys attend_and_merge; // its backward is backward_here

} // namespace shardtensor::detail
