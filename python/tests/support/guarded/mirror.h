#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace guarded {

/// The tensors of one kernel, seen from the host: CPU tensors in their memory,
/// for which somebody must have it open and alive, or in zeros of their own.
/// Tensors that share a storage share the result's.
class Mirror {
 public:
  enum class Of { Memory, Zeros };
  explicit Mirror(Of of) : of_(of) {}

  /// A CPU tensor for `x`; `x` itself where it is on the host.
  at::Tensor on_host(const at::Tensor& x);

  /// A guarded tensor for what a CPU kernel made: of the memory of one of the
  /// tensors above where it is a view of those, of new memory where it is not.
  at::Tensor on_device(const at::Tensor& made);
  bool knows(const at::Tensor& made) const;

  /// The memory of the tensors above.
  const std::vector<Use>& uses() const {
    return uses_;
  }

 private:
  struct Known {
    c10::Storage device;
    c10::DispatchKeySet keys; // views take them over, those of inference, too
  };
  c10::Storage host_storage(const c10::Storage& device);

  Of of_;
  std::vector<Use> uses_;
  std::unordered_map<const void*, c10::Storage> by_device_; // by StorageImpl
  std::unordered_map<const void*, Known> by_host_;
};

} // namespace guarded
