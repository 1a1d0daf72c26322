#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor {

/// A tensor that shows its global sizes and holds one rank's shard: a plain
/// local tensor and the spec that places it. It owns a storage of the global
/// byte count with no memory behind it; reading it raises. All work is done by
/// the kernels on kFunctionKey and kDispatchKey.
///
/// Strides are those of a global tensor laid out in memory like the local one
/// (Note [Global strides]), so that memory formats and contiguity survive.
class ShardTensorImpl : public c10::TensorImpl {
 public:
  ShardTensorImpl(at::Tensor local, SpecPtr spec);

  const at::Tensor& local() const {
    return local_;
  }
  const SpecPtr& spec() const {
    return spec_;
  }
  /// New data under the same identity: what an in-place operator that changes
  /// sizes, `.data =` and a compiled graph do.
  void set(at::Tensor local, SpecPtr spec);

  /// True for the result of a view operator whose input had to be moved first:
  /// it shares no memory with its base, so writing into it must raise.
  bool is_view_copy() const {
    return is_view_copy_;
  }
  void set_is_view_copy() {
    is_view_copy_ = true;
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter,
      bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter,
      bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;

 protected:
  const char* tensorimpl_type_name() const override {
    return "ShardTensorImpl";
  }

 private:
  void refresh();

  at::Tensor local_;
  SpecPtr spec_;
  // Note [Shared memory]: a second owner, so that autograd never takes this
  // tensor's memory for its own alone.
  c10::Storage second_owner_;
  bool is_view_copy_ = false;
};

/// True for every tensor that this library made.
inline bool is_shard_tensor(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kDispatchKey);
}

/// The implementation behind a ShardTensor. Raises for a plain tensor, also
/// for one whose `.data` was set to a ShardTensor.
ShardTensorImpl* impl_of(const at::Tensor& tensor);

/// The one birthplace: a new wrapper around `local`, which must not require
/// grad and must have spec's local sizes on this rank. No autograd history, no
/// communication.
at::Tensor wrap(const at::Tensor& local, const SpecPtr& spec);

/// Called with every new wrapper: the Python package gives it its class there.
/// The C++ library runs without.
using BirthHook = void (*)(const at::Tensor&);
void set_birth_hook(BirthHook hook);

} // namespace shardtensor
