#pragma once

#include <atomic>
#include <functional>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor {

/// A user's kernel for an operator at the dispatch level, set and removed at
/// run time: takes the arguments from the stack and leaves the results there.
/// It stands before the operator's rule. Autograd is above it.
using Handler =
    std::function<void(const c10::OperatorHandle&, torch::jit::Stack*)>;

/// `op` is "aten::add.Tensor". Replaces an earlier handler. Raises for an
/// unknown operator and for one that is decomposed before the dispatch level.
void set_handler(const std::string& op, Handler handler);
/// Raises when there is none.
void remove_handler(const std::string& op);

extern std::atomic<bool> any_handler;

/// Runs the operator's handler; false when there is none, or when the call
/// comes from that handler itself: then the operator's rule serves it.
bool run_handler(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// What every dispatch-level kernel asks first; nearly free without handlers.
inline bool handled(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  return any_handler.load(std::memory_order_relaxed) && run_handler(op, stack);
}

} // namespace shardtensor
