#pragma once

#include <functional>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor {

/// A user's kernel for an operator at the dispatch level, set and removed at
/// run time: takes the arguments from the stack and leaves the results there.
/// It stands before the operator's rule; autograd is above it. A call of the
/// operator from its own handler is served by the rule.
using Handler =
    std::function<void(const c10::OperatorHandle&, torch::jit::Stack*)>;

/// `op` is "aten::add.Tensor". Replaces an earlier handler. Raises for an
/// unknown operator, for one that is decomposed before the dispatch level, and
/// for one that a function-level rule serves whole.
void set_handler(const std::string& op, Handler handler);
/// Raises when there is none.
void remove_handler(const std::string& op);

} // namespace shardtensor
