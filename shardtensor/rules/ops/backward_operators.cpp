// Operators that PyTorch's derivative formulas call. Function-level rules have
// derivatives of their own, so these are met only under torch.func's
// transforms, which leave rules to what is inside (function_rule.h), and where
// a program calls them. Each is the gradient of its forward operator, which is
// computed once more: that has a rule, and the gradient of a rule gathers
// nothing.
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_adaptive_avg_pool2d_backward_ops.h>
#include <ATen/ops/_adaptive_avg_pool3d_backward_ops.h>
#include <ATen/ops/_upsample_bicubic2d_aa_backward_ops.h>
#include <ATen/ops/_upsample_bicubic2d_aa_ops.h>
#include <ATen/ops/_upsample_bilinear2d_aa_backward_ops.h>
#include <ATen/ops/_upsample_bilinear2d_aa_ops.h>
#include <ATen/ops/_upsample_nearest_exact1d_backward_ops.h>
#include <ATen/ops/_upsample_nearest_exact1d_ops.h>
#include <ATen/ops/_upsample_nearest_exact2d_backward_ops.h>
#include <ATen/ops/_upsample_nearest_exact2d_ops.h>
#include <ATen/ops/_upsample_nearest_exact3d_backward_ops.h>
#include <ATen/ops/_upsample_nearest_exact3d_ops.h>
#include <ATen/ops/adaptive_avg_pool2d.h>
#include <ATen/ops/adaptive_avg_pool3d.h>
#include <ATen/ops/adaptive_max_pool2d.h>
#include <ATen/ops/adaptive_max_pool2d_backward_ops.h>
#include <ATen/ops/adaptive_max_pool3d.h>
#include <ATen/ops/adaptive_max_pool3d_backward_ops.h>
#include <ATen/ops/avg_pool2d_backward_ops.h>
#include <ATen/ops/avg_pool2d_ops.h>
#include <ATen/ops/avg_pool3d_backward_ops.h>
#include <ATen/ops/avg_pool3d_ops.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/cudnn_batch_norm_backward_ops.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices_backward_ops.h>
#include <ATen/ops/max_pool3d.h>
#include <ATen/ops/max_pool3d_with_indices_backward_ops.h>
#include <ATen/ops/native_batch_norm_backward_ops.h>
#include <ATen/ops/reflection_pad1d_backward_ops.h>
#include <ATen/ops/reflection_pad1d_ops.h>
#include <ATen/ops/reflection_pad2d_backward_ops.h>
#include <ATen/ops/reflection_pad2d_ops.h>
#include <ATen/ops/reflection_pad3d_backward_ops.h>
#include <ATen/ops/reflection_pad3d_ops.h>
#include <ATen/ops/replication_pad1d_backward_ops.h>
#include <ATen/ops/replication_pad1d_ops.h>
#include <ATen/ops/replication_pad2d_backward_ops.h>
#include <ATen/ops/replication_pad2d_ops.h>
#include <ATen/ops/replication_pad3d_backward_ops.h>
#include <ATen/ops/replication_pad3d_ops.h>
#include <ATen/ops/upsample_bicubic2d_backward_ops.h>
#include <ATen/ops/upsample_bicubic2d_ops.h>
#include <ATen/ops/upsample_bilinear2d_backward_ops.h>
#include <ATen/ops/upsample_bilinear2d_ops.h>
#include <ATen/ops/upsample_linear1d_backward_ops.h>
#include <ATen/ops/upsample_linear1d_ops.h>
#include <ATen/ops/upsample_nearest1d_backward_ops.h>
#include <ATen/ops/upsample_nearest1d_ops.h>
#include <ATen/ops/upsample_nearest2d_backward_ops.h>
#include <ATen/ops/upsample_nearest2d_ops.h>
#include <ATen/ops/upsample_nearest3d_backward_ops.h>
#include <ATen/ops/upsample_nearest3d_ops.h>
#include <ATen/ops/upsample_trilinear3d_backward_ops.h>
#include <ATen/ops/upsample_trilinear3d_ops.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"

namespace shardtensor::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Tensors = std::vector<Tensor>;

/// The gradients of `forward(inputs)` for the inputs that are wanted, undefined
/// for the others. They have derivatives where one of those that are given has.
template <class Forward>
Tensors gradients_of(
    const char* op,
    const Forward& forward,
    const Tensor& grad,
    Tensors inputs,
    at::ArrayRef<bool> wanted) {
  bool create_graph = grad.requires_grad();
  for (const auto& input : inputs) {
    create_graph |= input.defined() && input.requires_grad();
  }
  create_graph &= at::GradMode::is_enabled();
  // Inference mode's tensors cannot be saved.
  const bool copies = c10::InferenceMode::is_enabled();
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode enabled(true);
  // The forward operator was given what autocast wanted.
  const c10::impl::ExcludeDispatchKeyGuard as_given(
      c10::autocast_dispatch_keyset);
  auto given = inputs;
  given.push_back(grad);
  const auto mesh = common_mesh(op, given);
  Tensors leaves;
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto& input = inputs[i];
    if (!input.defined()) {
      continue;
    }
    input = promote(input, mesh);
    // Gradients of this call, not of what else the input went into.
    input = copies                              ? input.clone()
        : create_graph && input.requires_grad() ? input.view_as(input)
                                                : input.detach();
    if (wanted[i]) {
      input.requires_grad_();
      leaves.push_back(input);
    }
  }
  Tensors results(inputs.size());
  if (leaves.empty()) {
    return results;
  }
  const auto found = torch::autograd::grad(
      {forward(inputs)},
      leaves,
      {copies ? promote(grad, mesh).clone() : promote(grad, mesh)},
      /*retain_graph=*/create_graph,
      create_graph);
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && wanted[i]) {
      results[i] = found[next++];
    }
  }
  return results;
}

template <class Forward>
Tensor gradient_of(
    const char* op,
    const Forward& forward,
    const Tensor& grad,
    const Tensor& input) {
  return gradients_of(
      op,
      [&](const Tensors& inputs) { return forward(inputs[0]); },
      grad,
      {input},
      {true})[0];
}

/// As it is given to an operator whose schema has symbolic sizes.
template <class Wanted, class Given>
decltype(auto) as(const Given& given) {
  if constexpr (std::is_same_v<Wanted, c10::SymIntArrayRef>) {
    return c10::fromIntArrayRefSlow(given);
  } else {
    return given;
  }
}

// ---- of an input that is given ----------------------------------------------

template <class Op, class Forward, class Signature = typename Op::schema>
struct Backward;

/// grad, input and the arguments of the forward operator.
template <class Op, class Forward, class... Args>
struct Backward<Op, Forward, Tensor(const Tensor&, const Tensor&, Args...)> {
  static Tensor call(
      const Tensor& grad,
      const Tensor& input,
      typename c10::remove_symint<Args>::type... args) {
    return gradient_of(
        Op::name,
        [&](const Tensor& x) { return Forward::call(x, as<Args>(args)...); },
        grad,
        input);
  }
};

template <class Pool>
struct MaxPool {
  static Tensor call(
      const Tensor& grad,
      const Tensor& input,
      IntArrayRef kernel,
      IntArrayRef stride,
      IntArrayRef padding,
      IntArrayRef dilation,
      bool ceil_mode,
      const Tensor& /*indices*/) {
    return gradient_of(
        Pool::name,
        [&](const Tensor& x) {
          return Pool::call(x, kernel, stride, padding, dilation, ceil_mode);
        },
        grad,
        input);
  }
};

template <int64_t dims>
Tensor adaptive_avg_pool_backward(const Tensor& grad, const Tensor& input) {
  const auto sizes = grad.sizes().slice(grad.dim() - dims).vec();
  return gradient_of(
      "adaptive_avg_pool",
      [&](const Tensor& x) {
        return dims == 2 ? at::adaptive_avg_pool2d(x, sizes)
                         : at::adaptive_avg_pool3d(x, sizes);
      },
      grad,
      input);
}

template <int64_t dims>
Tensor adaptive_max_pool_backward(
    const Tensor& grad,
    const Tensor& input,
    const Tensor& /*indices*/) {
  const auto sizes = grad.sizes().slice(grad.dim() - dims).vec();
  return gradient_of(
      "adaptive_max_pool",
      [&](const Tensor& x) {
        return std::get<0>(
            dims == 2 ? at::adaptive_max_pool2d(x, sizes)
                      : at::adaptive_max_pool3d(x, sizes));
      },
      grad,
      input);
}

// ---- of an input that does not count ----------------------------------------

/// Zeros of these sizes, cut along the dims that `grad` is cut along.
Tensor zeros_cut_as(const Tensor& grad, IntArrayRef sizes) {
  const auto like = without_partial(spec(grad));
  const auto layout = make_spec(like->mesh(), sizes.vec(), like->placements());
  const auto& options = impl_of(grad)->local().options();
  return from_local(
      at::zeros({}, options).expand(layout->local_sizes()), layout);
}

template <class Op, class Forward, class Signature = typename Op::schema>
struct UpsampleBackward;

/// grad, sizes of output and input, and the forward operator's other arguments.
template <class Op, class Forward, class... Args>
struct UpsampleBackward<
    Op,
    Forward,
    Tensor(const Tensor&, c10::SymIntArrayRef, c10::SymIntArrayRef, Args...)> {
  static Tensor call(
      const Tensor& grad,
      IntArrayRef output_size,
      IntArrayRef input_size,
      Args... args) {
    return gradient_of(
        Op::name,
        [&](const Tensor& x) {
          return Forward::call(
              x, c10::fromIntArrayRefSlow(output_size), args...);
        },
        grad,
        zeros_cut_as(grad, input_size));
  }
};

// ---- of weights, too --------------------------------------------------------

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Gradients convolution_backward_function(
    const Tensor& grad,
    const Tensor& input,
    const Tensor& weight,
    at::OptionalIntArrayRef bias_sizes,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  Tensor bias; // its values do not count
  if (wanted[2]) {
    const int64_t channels =
        bias_sizes ? c10::multiply_integers(*bias_sizes) : grad.size(1);
    bias = at::zeros({channels}, weight.options());
  }
  const auto found = gradients_of(
      "convolution_backward",
      [&](const Tensors& given) {
        return at::convolution(
            given[0],
            given[1],
            given[2],
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups);
      },
      grad,
      {input, weight, bias},
      wanted);
  return {found[0], found[1], found[2]};
}

using OptionalTensor = std::optional<Tensor>;

Gradients native_batch_norm_backward_function(
    const Tensor& grad,
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    const OptionalTensor& /*save_mean*/,
    const OptionalTensor& /*save_invstd*/,
    bool training,
    double eps,
    std::array<bool, 3> wanted) {
  const auto scale = value_or_undefined(weight);
  Tensor bias; // its values do not count
  if (wanted[2]) {
    const auto& like = scale.defined() ? scale : input;
    bias = at::zeros({input.size(1)}, like.options());
  }
  const auto found = gradients_of(
      "native_batch_norm_backward",
      [&](const Tensors& given) {
        return at::batch_norm(
            given[0],
            given[1],
            given[2],
            training ? Tensor() : value_or_undefined(running_mean),
            training ? Tensor() : value_or_undefined(running_var),
            training,
            /*momentum=*/0,
            eps,
            /*cudnn_enabled=*/false);
      },
      grad,
      {input, scale, bias},
      wanted);
  return {found[0], found[1], found[2]};
}

Gradients cudnn_batch_norm_backward_function(
    const Tensor& input,
    const Tensor& grad,
    const Tensor& weight,
    const OptionalTensor& /*running_mean*/,
    const OptionalTensor& /*running_var*/,
    const OptionalTensor& /*save_mean*/,
    const OptionalTensor& /*save_var*/,
    double eps,
    const Tensor& /*reserve*/) {
  return native_batch_norm_backward_function(
      grad,
      input,
      weight,
      {},
      {},
      {},
      {},
      /*training=*/true,
      eps,
      {true, true, true});
}

// ---- registration -----------------------------------------------------------

template <class Op, auto function>
void add(torch::Library& m) {
  m.impl(Op::name, function_rule<Op, function>);
}

template <class Op, class Forward>
void add_backward(torch::Library& m) {
  add<Op, &Backward<Op, Forward>::call>(m);
}

template <class Op, class Forward>
void add_upsample(torch::Library& m) {
  add<Op, &UpsampleBackward<Op, Forward>::call>(m);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  using namespace at::_ops;
  add_backward<avg_pool2d_backward, avg_pool2d>(m);
  add_backward<avg_pool3d_backward, avg_pool3d>(m);
  add_backward<reflection_pad1d_backward, reflection_pad1d>(m);
  add_backward<reflection_pad2d_backward, reflection_pad2d>(m);
  add_backward<reflection_pad3d_backward, reflection_pad3d>(m);
  add_backward<replication_pad1d_backward, replication_pad1d>(m);
  add_backward<replication_pad2d_backward, replication_pad2d>(m);
  add_backward<replication_pad3d_backward, replication_pad3d>(m);
  add_upsample<upsample_nearest1d_backward, upsample_nearest1d>(m);
  add_upsample<upsample_nearest2d_backward, upsample_nearest2d>(m);
  add_upsample<upsample_nearest3d_backward, upsample_nearest3d>(m);
  add_upsample<_upsample_nearest_exact1d_backward, _upsample_nearest_exact1d>(
      m);
  add_upsample<_upsample_nearest_exact2d_backward, _upsample_nearest_exact2d>(
      m);
  add_upsample<_upsample_nearest_exact3d_backward, _upsample_nearest_exact3d>(
      m);
  add_upsample<upsample_linear1d_backward, upsample_linear1d>(m);
  add_upsample<upsample_bilinear2d_backward, upsample_bilinear2d>(m);
  add_upsample<upsample_trilinear3d_backward, upsample_trilinear3d>(m);
  add_upsample<upsample_bicubic2d_backward, upsample_bicubic2d>(m);
  add_upsample<_upsample_bilinear2d_aa_backward, _upsample_bilinear2d_aa>(m);
  add_upsample<_upsample_bicubic2d_aa_backward, _upsample_bicubic2d_aa>(m);
  add<max_pool2d_with_indices_backward, &MaxPool<max_pool2d>::call>(m);
  add<max_pool3d_with_indices_backward, &MaxPool<max_pool3d>::call>(m);
  add<_adaptive_avg_pool2d_backward, &adaptive_avg_pool_backward<2>>(m);
  add<_adaptive_avg_pool3d_backward, &adaptive_avg_pool_backward<3>>(m);
  add<adaptive_max_pool2d_backward, &adaptive_max_pool_backward<2>>(m);
  add<adaptive_max_pool3d_backward, &adaptive_max_pool_backward<3>>(m);
  add<convolution_backward, &convolution_backward_function>(m);
  add<native_batch_norm_backward, &native_batch_norm_backward_function>(m);
  add<cudnn_batch_norm_backward, &cudnn_batch_norm_backward_function>(m);
}

} // namespace shardtensor::detail
