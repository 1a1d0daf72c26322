#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// Note [Home of a spectrum]
// A forward transform leaves a spectrum where it costs least. What a program
// does next (weights, truncation, another number of channels) gives tensors of
// other sizes and layouts, and then an inverse transform whose result meets the
// signal again: `x + irfft2(f(rfft2(x)))`. So transforms remember, by mesh and
// by transformed dims and their extents, where the last signal came from and
// where its spectrum went; the inverse goes there. Values never depend on it.
// Ranks of one mesh run the same transforms in the same order, and so remember
// the same.

/// Remembers that a signal laid out as `signal` became a spectrum laid out as
/// `spectrum`.
void remember_home(
    const SpecPtr& signal,
    const SpecPtr& spectrum,
    const std::vector<int64_t>& dims);

/// Where the signal of these sizes, whose spectrum lies as `spectrum`, belongs;
/// null if nobody knows. Of several signals of the same extents the one whose
/// spectrum lay alike, else the last; else of those of other extents. What need
/// not move goes only where a spectrum that lay like it came from; but what
/// every rank has is cut without a message, if it is real afterwards and so an
/// inverse.
SpecPtr recall_home(
    const SpecPtr& spectrum,
    const std::vector<int64_t>& signal_sizes,
    const std::vector<int64_t>& dims,
    bool is_real);

} // namespace shardtensor::detail
