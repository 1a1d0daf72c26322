#pragma once

#include <initializer_list>
#include <utility>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor::detail {

/// Note [Sparse operands]
/// A plain sparse matrix cannot be promoted, for the pieces of a ShardTensor
/// are strided. Products with one have function-level rules that take it as it
/// is. They are no kernels of the function level, where they would stand in the
/// way of dense products: a call comes here because its keys name a sparse
/// layout. Composite operators are taken apart first; all others refuse.
class RegisterSparse {
 public:
  struct Entry {
    const char* op; // "aten::mm"
    c10::KernelFunction function; // of the operator's C++ signature
  };
  RegisterSparse(std::initializer_list<Entry> entries);
};

template <class Function>
c10::KernelFunction sparse_function(Function* function) {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
}

/// Whether the keys of a call name a sparse layout.
inline bool has_sparse(c10::DispatchKeySet keys) {
  constexpr c10::DispatchKeySet sparse{
      c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr};
  return keys.has_any(sparse);
}

/// True when the call on the stack, which has a sparse tensor among its
/// arguments, was one of these, and is done.
bool run_with_sparse(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack);

} // namespace shardtensor::detail
