#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shardtensor {

/// One step of a ring over a group, for programs that work on local tensors: x
/// goes to the rank `step` places further on, around the end, and the result is
/// what the rank `step` places back sends, of receive_sizes. Negative steps go
/// the other way, which is the adjoint; differentiable to any order.
/// Communication: one message each way. Thread safety / ordering: as in
/// collectives.h.
///
/// Example: ranks 0, 1 and 2 hold {1}, {2} and {3}: with step 1 they get {3},
/// {1} and {2}.
at::Tensor ring_step(
    const at::Tensor& x,
    int64_t step,
    c10::IntArrayRef receive_sizes,
    const std::string& group);

} // namespace shardtensor
