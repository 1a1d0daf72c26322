#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardtensor {

// The two dispatch keys that carry a ShardTensor. PyTorch has no keys for
// third parties, so we borrow two that no eager tensor uses; another PyTorch
// version changes this file only.

/// Function level: above autograd and autocast. Composite operators arrive
/// whole; plain tensors are promoted here.
constexpr c10::DispatchKey kFunctionKey = c10::DispatchKey::DeferredInit;

/// Whether a call came past the function level, see Note [Function level left
/// out].
inline bool function_level_is_left_out() {
  return c10::impl::tls_is_dispatch_key_excluded(kFunctionKey);
}

/// Dispatch level: below autograd.
constexpr c10::DispatchKey kDispatchKey = c10::DispatchKey::CustomRNGKeyId;

/// Tensors of transforms (torch.func's, and autograd's batched gradients),
/// which call an operator again on what is inside.
constexpr c10::DispatchKeySet kTransformKeys{
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::Batched};

/// The same keys, as TORCH_LIBRARY_IMPL wants them.
#define SHARDTENSOR_FUNCTION_KEY DeferredInit
#define SHARDTENSOR_DISPATCH_KEY CustomRNGKeyId

} // namespace shardtensor
