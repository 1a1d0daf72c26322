#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "shardtensor/dispatch/index_bounds.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/labels.h"

// Operators that need an image, or what was an image, whole. Samples stay cut;
// of images without a sample dim unpooling keeps the channels cut.

namespace shardtensor::detail {
namespace {

/// The first `kept` dims of all tensors may be cut.
Decision kept_dims_rule(Call& call, int64_t kept, Linearity linearity) {
  const auto labels_of = [&](size_t dims) {
    std::vector<int64_t> own(dims, kPrivate);
    for (int64_t dim = 0; dim < kept; ++dim) {
      own[dim] = dim;
    }
    return own;
  };
  Labels labels;
  for (const auto& operand : call.operands()) {
    labels.operands.push_back(labels_of(operand.dim()));
  }
  for (const auto& sizes : call.output_sizes()) {
    labels.outputs.push_back(labels_of(sizes.size()));
  }
  auto decision = rule_by_labels(call, labels, linearity);
  decision.is_repair = true; // where an image is cut
  return decision;
}

Decision im2col_rule(Call& call) {
  return kept_dims_rule(call, call.operand(0).dim() - 3, Linearity::Unary);
}

Decision col2im_rule(Call& call) {
  return kept_dims_rule(call, call.operand(0).dim() - 2, Linearity::Unary);
}

Decision max_unpool_rule(Call& call) {
  return kept_dims_rule(call, 1, Linearity::None);
}

const RegisterRules of_images{
    {"aten::im2col", im2col_rule},
    {"aten::col2im", col2im_rule},
};

/// See Note [Indices out of bounds].
at::Tensor max_unpool(const char* name, torch::jit::Stack stack) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  check_index(
      name,
      stack[1].toTensor(),
      0,
      c10::multiply_integers(stack[2].toDimVector()));
  run_rule(op, max_unpool_rule, &stack);
  return stack.back().toTensor();
}

at::Tensor max_unpool2d_kernel(
    const at::Tensor& self,
    const at::Tensor& indices,
    at::IntArrayRef output_size) {
  return max_unpool("aten::max_unpool2d", {self, indices, output_size});
}

at::Tensor max_unpool3d_kernel(
    const at::Tensor& self,
    const at::Tensor& indices,
    at::IntArrayRef output_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding) {
  return max_unpool(
      "aten::max_unpool3d", {self, indices, output_size, stride, padding});
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("max_unpool2d", max_unpool2d_kernel);
  m.impl("max_unpool3d", max_unpool3d_kernel);
}

} // namespace shardtensor::detail
