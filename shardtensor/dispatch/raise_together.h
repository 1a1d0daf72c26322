#pragma once

#include <functional>
#include <string>

#include <ATen/core/TensorBody.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// Note [Errors by value]
// Some kernels look at values on a CPU: a probability above 1, a division of
// integers by zero. The rank whose piece has the bad value would raise alone,
// and the others wait for it in their next message. Indices are looked at
// beforehand: see Note [Indices out of bounds].

/// Calls `run`. Where it raises on some ranks, the error of the first of them
/// is raised on every rank that `layout` gives a piece of its own, as the same
/// kind of error. Null: all ranks hold the same. Communication:
/// an all-reduce of one number on `device` where `layout` is sharded, of the
/// message where a rank raised.
void raise_together(
    const std::string& op,
    const SpecPtr& layout,
    const std::function<void()>& run,
    c10::Device device = at::kCPU);

} // namespace shardtensor::detail
