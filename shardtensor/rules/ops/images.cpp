#include <algorithm>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/im2col_shape_check.h>
#include <ATen/ops/empty.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/labels.h"

// Operators that need an image, or what was an image, whole. Samples stay cut,
// and channels where they are unpooled. stencil/columns.cpp makes columns of
// images that are cut.

namespace shardtensor::detail {
namespace {

using Dims = std::vector<int64_t>;

/// The first `kept` dims of all tensors may be cut.
Decision kept_dims_rule(Call& call, int64_t kept, Linearity linearity) {
  const auto labels_of = [&](size_t dims) {
    Dims own(dims, kPrivate);
    const auto cut = std::min(kept, static_cast<int64_t>(dims)); // or it raises
    for (int64_t dim = 0; dim < cut; ++dim) {
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

// im2col's and col2im's Meta kernels are Python's, see Note [Meta kernels in
// Python]; their checks are these.

struct Windows {
  explicit Windows(const Call& call)
      : kernel(call.argument("kernel_size").toIntVector()),
        dilation(call.argument("dilation").toIntVector()),
        padding(call.argument("padding").toIntVector()),
        stride(call.argument("stride").toIntVector()) {}

  bool are_of_images() const {
    return kernel.size() == 2 && dilation.size() == 2 && padding.size() == 2 &&
        stride.size() == 2;
  }
  int64_t count(int64_t extent, size_t i) const {
    const int64_t last =
        extent + 2 * padding[i] - dilation[i] * (kernel[i] - 1);
    return (last - 1) / stride[i] + 1;
  }

  Dims kernel;
  Dims dilation;
  Dims padding;
  Dims stride;
};

void set_im2col_sizes(Call& call) {
  const Windows w(call);
  if (!w.are_of_images()) {
    return;
  }
  const auto& image = call.operand(0).tensor;
  at::native::im2col_shape_check(
      image,
      at::Tensor(),
      w.kernel[0],
      w.kernel[1],
      w.dilation[0],
      w.dilation[1],
      w.padding[0],
      w.padding[1],
      w.stride[0],
      w.stride[1]);
  auto sizes = image.sizes().vec();
  const auto columns = w.count(image.size(-2), 0) * w.count(image.size(-1), 1);
  sizes.pop_back();
  sizes.back() = columns;
  sizes[sizes.size() - 2] *= w.kernel[0] * w.kernel[1];
  call.set_output_sizes({std::move(sizes)});
}

void set_col2im_sizes(Call& call) {
  const Windows w(call);
  const auto image = call.argument("output_size").toIntVector();
  if (!w.are_of_images() || image.size() != 2) {
    return;
  }
  const auto& columns = call.operand(0).tensor;
  at::native::col2im_shape_check(
      columns,
      at::Tensor(),
      image[0],
      image[1],
      w.kernel[0],
      w.kernel[1],
      w.dilation[0],
      w.dilation[1],
      w.padding[0],
      w.padding[1],
      w.stride[0],
      w.stride[1]);
  auto sizes = columns.sizes().vec();
  sizes.back() = image[0];
  sizes.push_back(image[1]);
  sizes[sizes.size() - 3] /= w.kernel[0] * w.kernel[1];
  call.set_output_sizes({std::move(sizes)});
}

Decision im2col_rule(Call& call) {
  set_im2col_sizes(call);
  return kept_dims_rule(call, call.operand(0).dim() - 3, Linearity::Unary);
}

Decision col2im_rule(Call& call) {
  set_col2im_sizes(call);
  return kept_dims_rule(call, call.operand(0).dim() - 2, Linearity::Unary);
}

/// Whether channels may stay as they are: PyTorch takes no samples without any,
/// which cuts could leave that move here from an image.
bool keeps_channels(const Call& call) {
  const auto fits = [](const Operand& own) {
    const auto dims = own.spec ? own.spec->sharded_dims() : Dims();
    return std::all_of(dims.begin(), dims.end(), [&](int64_t dim) {
      return dim == 0 ||
          (dim == 1 && !own.spec->partition(dim).has_empty_piece());
    });
  };
  return std::all_of(call.operands().begin(), call.operands().end(), fits);
}

/// The Meta kernel refuses what is not deterministic on CUDA, whatever the
/// device.
void set_max_unpool_sizes(Call& call, int64_t dims) {
  const auto& image = call.operand(0).tensor;
  const auto shape = call.argument("output_size").toIntVector();
  if (image.dim() <= dims || static_cast<int64_t>(shape.size()) != dims) {
    return;
  }
  auto sizes = image.sizes().vec();
  std::copy(shape.begin(), shape.end(), sizes.end() - dims);
  const auto options = image.options().device(at::kMeta).memory_format(
      dims == 2 ? image.suggest_memory_format() : at::MemoryFormat::Contiguous);
  call.set_output_strides({at::empty(sizes, options).strides().vec()});
  call.set_output_sizes({std::move(sizes)});
}

template <int64_t dims>
Decision max_unpool_rule(Call& call) {
  if (at::globalContext().deterministicAlgorithms()) {
    set_max_unpool_sizes(call, dims);
  }
  const auto kept = call.operand(0).dim() - dims;
  return kept_dims_rule(call, keeps_channels(call) ? kept : 1, Linearity::None);
}

const RegisterRules of_images{
    {"aten::im2col", im2col_rule},
    {"aten::col2im", col2im_rule},
};

/// See Note [Indices out of bounds]. A rank without images would take any type.
template <int64_t dims>
at::Tensor max_unpool(const char* name, torch::jit::Stack stack) {
  const auto& image = stack[0].toTensor();
  TORCH_CHECK_NOT_IMPLEMENTED(
      image.is_cuda() || image.is_floating_point(),
      name,
      ": not implemented for ",
      image.scalar_type());
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  check_gather_index(
      name,
      stack[1].toTensor(),
      0,
      c10::multiply_integers(stack[2].toDimVector()));
  run_rule(op, max_unpool_rule<dims>, &stack);
  return stack.back().toTensor();
}

at::Tensor max_unpool2d_kernel(
    const at::Tensor& self,
    const at::Tensor& indices,
    at::IntArrayRef output_size) {
  return max_unpool<2>("aten::max_unpool2d", {self, indices, output_size});
}

at::Tensor max_unpool3d_kernel(
    const at::Tensor& self,
    const at::Tensor& indices,
    at::IntArrayRef output_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding) {
  return max_unpool<3>(
      "aten::max_unpool3d", {self, indices, output_size, stride, padding});
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("max_unpool2d", max_unpool2d_kernel);
  m.impl("max_unpool3d", max_unpool3d_kernel);
}

} // namespace shardtensor::detail
