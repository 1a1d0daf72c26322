#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"

// What has no meaning for a tensor of which each rank holds a box. as_strided
// is in view.cpp: ATen calls it for views that change nothing.

namespace shardtensor::detail {
namespace {

constexpr const char* kWaysOut =
    "; use full_tensor() for the whole tensor or to_local() for the piece";

void refuse_sparse(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      c10::toString(op.operator_name()),
      ": the pieces of a ShardTensor are strided boxes, no other layout can be "
      "cut like them",
      kWaysOut);
}

void refuse_sparse_parts(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      c10::toString(op.operator_name()),
      ": no sparse layout can have ShardTensors as its indices or values; "
      "x[sources] and index_add do the work of its products, full_tensor() of "
      "each makes a matrix that all ranks have");
}

/// Of nn.TransformerEncoder in eval mode: the Python package goes on without.
void refuse_nested(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      c10::toString(op.operator_name()),
      ": the rows of a nested tensor cannot be cut like a ShardTensor's",
      kWaysOut,
      ", and nn.TransformerEncoder(..., enable_nested_tensor=False) for padded "
      "rows");
}

/// PyTorch asks before it sets a tensor's .data, and a module before it does so
/// to a parameter: a plain tensor would keep its type and lose its memory. Of
/// the other way ShardTensorImpl speaks.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  return (is_shard_tensor(self) || !is_shard_tensor(from)) &&
      self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(
          from.key_set());
}

/// Other sizes would cut the elements in memory order anew. Without elements
/// there is nothing to keep: what PyTorch does to an empty out=.
const at::Tensor& resize_kernel(
    const at::Tensor& self,
    at::IntArrayRef size,
    std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) {
    return self;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      self.numel() == 0,
      "resize_: a ShardTensor has no memory of its global sizes, so it cannot "
      "go from sizes ",
      self.sizes(),
      " to ",
      size,
      kWaysOut);
  auto* impl = impl_of(self);
  impl->set(
      at::empty(size, impl->local().options()),
      make_replicated(impl->spec()->mesh(), size.vec()));
  return self;
}

const at::Tensor& resize_as_kernel(
    const at::Tensor& self,
    const at::Tensor& like,
    std::optional<at::MemoryFormat> format) {
  return resize_kernel(self, like.sizes(), format);
}

constexpr const char* kSparse[] = {
    "_to_sparse",
    "_to_sparse.sparse_dim",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "_to_sparse_csc",
    "_to_sparse_csr",
    "to_mkldnn",
};

constexpr const char* kOfSparseParts[] = {
    "_sparse_compressed_tensor_unsafe",
    "_sparse_coo_tensor_unsafe",
    "_validate_sparse_compressed_tensor_args",
    "_validate_sparse_coo_tensor_args",
    "sparse_compressed_tensor.comp_plain_value",
    "sparse_compressed_tensor.comp_plain_value_size",
    "sparse_coo_tensor.indices",
    "sparse_coo_tensor.indices_size",
    "sparse_csr_tensor.crow_col_value",
    "sparse_csr_tensor.crow_col_value_size",
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  for (const char* name : kOfSparseParts) {
    m.impl(
        name,
        torch::CppFunction::makeFromBoxedFunction<&refuse_sparse_parts>());
  }
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("resize_", resize_kernel);
  m.impl("resize_as_", resize_as_kernel);
  for (const char* name : kSparse) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>());
  }
  for (const char* name :
       {"_nested_tensor_from_mask", "_nested_tensor_from_tensor_list"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
  }
}

} // namespace shardtensor::detail
