#pragma once

#include "shardtensor/rules/attention/meet.h"

namespace shardtensor::detail {

// The ways in which queries meet the keys of all ranks, see Meeting.

/// The extent of a sequence that the ranks hold together.
int64_t whole_extent(const std::vector<Rows>& ranks);

/// Gives every rank the rows that `to` names: one exchange.
at::Tensor move_rows(
    const at::Tensor& x,
    const std::vector<Rows>& from,
    const std::vector<Rows>& to,
    const AttentionWork& work);

Attended meet_all(
    const at::Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work);

/// The gradients of this rank's keys; adds to those of its queries.
Keys meet_all_backward(
    const Queries& queries,
    const Keys& keys,
    const AttentionWork& work);

} // namespace shardtensor::detail
