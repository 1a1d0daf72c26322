#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor::detail {

// Note [Functional forms]
// An in-place or out= operator without a rule of its own is the functional one
// of its name, whose results are then written: below autograd nothing else is
// left of it. Where a result has not the size or dtype of what it is written
// into, PyTorch's Meta kernel says on every rank whether that may be.

/// Runs an operator that writes into its arguments by its functional form.
/// False, and nothing was done: it has none, or one that would be gathered,
/// too.
bool run_functional_form(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack);

/// The same for a call that writes into ShardTensors and into plain tensors at
/// once, which take the whole value; also where the functional form is
/// gathered.
bool run_functional_form_into_all(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack);

/// The same, at the function level, for a composite out= operator that writes
/// into ShardTensors alone: its kernel would resize their memory.
bool run_composite_out(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace shardtensor::detail
