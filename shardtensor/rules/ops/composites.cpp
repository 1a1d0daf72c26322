#include <ATen/core/List.h>
#include <ATen/ops/dist_native.h>
#include <ATen/ops/native_channel_shuffle_native.h>
#include <ATen/ops/rot90_native.h>
#include <torch/library.h>

#include "shardtensor/tensor/keys.h"

// Operators that PyTorch makes of others, but not visibly to the dispatcher.
// What they are made of has rules.

namespace shardtensor::detail {
namespace {

/// aten::view_copy is a copy of what aten::view gives, and so on.
c10::OperatorHandle viewed_operator(const c10::OperatorName& copied) {
  const auto suffix = copied.name.rfind("_copy");
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      copied.name.substr(0, suffix).c_str(), copied.overload_name.c_str());
}

at::Tensor copy_of(const at::Tensor& view) {
  return view.clone(at::MemoryFormat::Contiguous);
}

void view_copy_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  viewed_operator(op.operator_name()).callBoxed(stack);
  auto& result = stack->back();
  if (result.isTensor()) {
    result = copy_of(result.toTensor());
    return;
  }
  c10::List<at::Tensor> copies;
  for (const at::Tensor& view : result.toTensorVector()) {
    copies.push_back(copy_of(view));
  }
  result = std::move(copies);
}

constexpr const char* kViewCopies[] = {
    "alias_copy",
    "detach_copy",
    "diagonal_copy",
    "expand_copy",
    "narrow_copy",
    "permute_copy",
    "select_copy.int",
    "slice_copy.Tensor",
    "split_copy.Tensor",
    "split_with_sizes_copy",
    "squeeze_copy",
    "squeeze_copy.dim",
    "squeeze_copy.dims",
    "t_copy",
    "transpose_copy.int",
    "unbind_copy.int",
    "unfold_copy",
    "unsqueeze_copy",
    "view_copy",
    "view_copy.dtype",
    "view_as_complex_copy",
    "view_as_real_copy",
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  for (const char* name : kViewCopies) {
    m.impl(
        name, torch::CppFunction::makeFromBoxedFunction<&view_copy_kernel>());
  }
  m.impl("channel_shuffle", at::native::math_channel_shuffle);
  m.impl("native_channel_shuffle", at::native::math_channel_shuffle);
  m.impl("dist", at::native::dist);
  m.impl("rot90", at::native::rot90);
}

} // namespace shardtensor::detail
