#pragma once

#include "shardtensor/dispatch/rule.h"

namespace shardtensor::detail {

/// For operators that work along their argument `dim`, with all other dims as
/// batch: it is made whole (its mesh axes move to another dim where there is
/// one), the others keep their layout.
Decision along_dim_rule(Call& call);

} // namespace shardtensor::detail
