#pragma once

#include "shardtensor/rules/points/neighbour_call.h"

namespace shardtensor::detail {

/// check_finite and find_neighbours, which see neither of them, for a compiler:
/// one operator, whose result has a size that it knows.
Nearest run_nearest(
    const LocalCall& call,
    int64_t most,
    std::optional<double> radius);

} // namespace shardtensor::detail
