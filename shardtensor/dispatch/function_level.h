#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/AutogradState.h>

#include "shardtensor/tensor/gradients/parameter_gradients.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/transformed.h"

namespace shardtensor {

// What function-level rules are made of. Such a rule is an ordinary function
// with the operator's C++ signature, registered on SHARDTENSOR_FUNCTION_KEY. It
// runs above autograd: to_local() -> communication -> plain ATen ->
// from_local(), or a composition of operators on ShardTensors; gradients of any
// order follow from the parts.

/// The mesh of the first ShardTensor among the arguments. Raises when there is
/// none, or when two are on different meshes.
MeshPtr common_mesh(const char* op, at::ArrayRef<at::Tensor> tensors);

/// In-place changes of a view are replayed on its base by the view's own
/// operator: as_strided has no meaning on a shard.
class ViewReplay {
 public:
  ViewReplay() : before_(state().get_view_replay_enabled()) {
    state().set_view_replay_enabled(true);
  }
  ~ViewReplay() {
    state().set_view_replay_enabled(before_);
  }
  ViewReplay(const ViewReplay&) = delete;
  ViewReplay& operator=(const ViewReplay&) = delete;

 private:
  static c10::AutogradState& state() {
    return c10::AutogradState::get_tls_state();
  }
  bool before_;
};

/// The keys of a call that goes on below the function level: the operator's own
/// composite kernel, say, whose operators come back to the function level.
/// Forward mode's zeros count as plain tensors, which promotion fills.
inline c10::DispatchKeySet below_function_level(c10::DispatchKeySet keys) {
  constexpr c10::DispatchKeySet below =
      c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kFunctionKey) -
      c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return keys & below;
}

/// What operators without a function-level rule do: plain tensors are promoted,
/// the call goes on to autograd. For boxed rules that change arguments.
void run_below_function_level(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack);

/// The same as boxed_call takes it.
struct BelowFunctionLevel {
  c10::DispatchKeySet keys;
  void operator()(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      const {
    run_below_function_level(op, keys, stack);
  }
};

inline at::Tensor value_or_undefined(const std::optional<at::Tensor>& tensor) {
  return tensor ? *tensor : at::Tensor();
}

} // namespace shardtensor
