#pragma once

#include <cstdint>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "meeting_point.h"

namespace shardtensor::testing {

/// A backend with NCCL's freedoms and NCCL's rules.
///
/// What it may do: a call only notes where its tensors lie. They are read and
/// written in the work's wait(), and outputs are full of poison until then; the
/// work keeps no tensor alive. Every third call, and every call that is not
/// asynchronous, is done at once and returns no work.
///
/// What it asks for: contiguous tensors of NCCL's dtypes; sends and receives
/// between startCoalescing and endCoalescing, after a collective that made the
/// group's communicator. A test fails when something was written into an
/// output before its wait, and when the group goes with work pending.
c10::intrusive_ptr<c10d::Backend> make_late_backend(
    int rank,
    int ranks,
    MeetingPointPtr point);

/// Of all late backends together.
struct LateCounts {
  int64_t sends = 0; // to other ranks, those of collectives among them
  int64_t empty_sends = 0;
  int64_t gathers = 0; // into one tensor
  int64_t works = 0; // that were waited for
  int64_t bounded_waits = 0; // with a limit: NCCL's host polls meanwhile
  int64_t alive = 0; // tensors of all-reduces that have memory still
};
LateCounts late_counts();
void reset_late_counts();

} // namespace shardtensor::testing
