#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// Note [Shared windows]
// Windows of a cut dim that overlap read rows of other ranks. Each belongs to
// the rank that has its middle, which gets a copy of what it lacks, a moved
// view: several ranks may hold a row. One that is written through a window
// differs then from what it was in one place alone, which tells its owner what
// to take. Windows that overlap are not written at once: which of the values
// of a row would last is decided by the order of writing.

/// Whether `size` rows, every `step` rows of `dim`, share rows that are cut.
bool windows_are_shared(
    const SpecPtr& own,
    int64_t dim,
    int64_t size,
    int64_t step);

/// self.unfold(dim, size, step) where windows_are_shared. Communication: one
/// exchange, and a redistribution where stencils cannot work as self is cut.
at::Tensor shared_windows(
    const at::Tensor& self,
    int64_t dim,
    int64_t size,
    int64_t step);

} // namespace shardtensor::detail
