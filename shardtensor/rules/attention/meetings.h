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

Attended attend_here(
    const at::Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work);
Keys backward_here(
    Queries& queries,
    const Keys& keys,
    const AttentionWork& work);

Attended attend_in_ring(
    const at::Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work);
Keys ring_backward(
    Queries& queries,
    const Keys& keys,
    const AttentionWork& work);

Attended attend_to_gathered(
    const at::Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work);
Keys gathered_backward(
    Queries& queries,
    const Keys& keys,
    const AttentionWork& work);

/// Its backward is backward_here.
Attended attend_and_merge(
    const at::Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work);

} // namespace shardtensor::detail
