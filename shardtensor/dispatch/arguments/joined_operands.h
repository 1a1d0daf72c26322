#pragma once

#include <optional>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {

/// Note [Joined operands]
/// Rules see ShardTensors of one mesh and plain tensors. A call that brings a
/// DTensor, or ShardTensors on two axes of one device mesh, is made again with
/// all of them as ShardTensors on the mesh that has the axes of each. A call
/// without pays for a bit test and a comparison of pointers.
class Joinable {
 public:
  explicit Joinable(c10::DispatchKeySet keys)
      : python_(keys.has(c10::DispatchKey::Python)) {}

  void see(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
    if (is_shard_tensor(tensor)) {
      const auto* own = spec(tensor)->mesh().get();
      found_ = found_ || (mesh_ && mesh_ != own);
      mesh_ = own;
    } else {
      found_ = found_ || (python_ && is_foreign(tensor));
    }
  }
  void see(const at::ITensorListRef& tensors) {
    for (const auto& tensor : tensors) {
      see(tensor);
    }
  }
  void see(const std::optional<at::Tensor>& tensor) {
    if (tensor) {
      see(*tensor);
    }
  }
  void see(const c10::IValue& value);
  template <class Other>
  void see(const Other&) {}

  /// Whether the call must go to run_joined.
  bool found() const {
    return found_;
  }

 private:
  static bool is_foreign(const at::Tensor& tensor);

  bool python_;
  bool found_ = false;
  const Mesh* mesh_ = nullptr;
};

/// The same for the arguments of `op` on a stack.
bool must_join(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    const torch::jit::Stack& stack);

/// Calls the operator from the top with joined operands. What it writes into an
/// argument is brought back to that, and results that are an argument are the
/// caller's own. Raises, the same on all ranks, for unrelated meshes.
void run_joined(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace shardtensor
