#pragma once

#include "shardtensor/rules/attention/work.h"

namespace shardtensor::detail {

// attend_all and attend_all_backward for tensors that a compiler traces: one
// operator each of its graph, which contains the messages, and finds in a mask
// what that hides.

Attended attend_as_operator(
    const at::Tensor& query,
    const Keys& keys,
    const Mask& mask,
    const AttentionWork& work);
AttentionGradients backward_as_operator(
    const AttendedQueries& queries,
    const Keys& keys,
    const Mask& mask,
    bool wants_mask,
    const AttentionWork& work);

} // namespace shardtensor::detail
