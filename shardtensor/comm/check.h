#pragma once

#include <string>

#include <c10/core/Device.h>

#include "shardtensor/comm/group.h"

namespace shardtensor::detail {

/// What this rank is about to do.
struct Collective {
  std::string text; // the same on every rank
  Splits sends;
  Splits receives;
};

/// In check mode: compares this call with those of the other ranks, and what
/// each rank sends with what its peer expects. Raises on every rank, listing
/// all calls, when they differ. Communication: one all-gather of 2 * ranks + 1
/// integers, one more when the calls differ.
void check_same_call(
    const Group& group,
    c10::Device device,
    const Collective& call);

} // namespace shardtensor::detail
