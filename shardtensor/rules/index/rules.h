#pragma once

#include "shardtensor/dispatch/rule.h"

namespace shardtensor {

// The rules that operators of other libraries can be registered with.

/// x[i, :, j] with index tensors (no masks) along dims that are not sharded,
/// and writing there.
Decision index_rule(Call& call);
Decision index_put_rule(Call& call);

} // namespace shardtensor
