#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/placement.h"

namespace shardtensor {

// What backends reduce in the place of a tensor, so that all of them can and
// all ranks get the same.

/// What travels for x, as a fresh contiguous tensor of a dtype that every
/// backend can reduce.
at::Tensor to_wire(const at::Tensor& x, Reduce reduce);

/// How that is reduced. An average is a sum, to be divided; sum and product of
/// booleans are their "or" and "and".
Reduce wire_reduce(const at::Tensor& x, Reduce reduce);

/// What came of it, as x has it.
at::Tensor from_wire(
    const at::Tensor& wire,
    const at::Tensor& x,
    Reduce reduce);

} // namespace shardtensor
