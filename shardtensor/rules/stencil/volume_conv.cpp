#include "shardtensor/rules/stencil/volume_conv.h"

#include <array>

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/mkldnn_convolution.h>

#include "shardtensor/tensor/gradients/saved_inputs_node.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using VolumeGradients =
    std::tuple<Tensor, Tensor, Tensor>; // of x, weight, bias
using Wanted = std::array<bool, 3>;

// PyTorch's own bound, of all dims.
constexpr int64_t kSmallest = 20480;

struct Settings {
  std::vector<int64_t> stride;
  std::vector<int64_t> padding;
  std::vector<int64_t> dilation;
  int64_t groups;
};

/// PyTorch's decision, which leaves out the last dim. An input in oneDNN's own
/// layout it never leaves to other kernels.
bool is_left_to_windows(const Tensor& x) {
  return x.size(0) == 1 && x.size(1) * x.size(2) * x.size(3) <= kSmallest;
}

Tensor from_onednn(const Tensor& x) {
  return x.defined() && x.is_mkldnn() ? x.to_dense() : x;
}

/// By PyTorch's differentiable operator.
VolumeGradients backward(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const Settings& s,
    at::IntArrayRef padding,
    const Wanted& wanted) {
  const std::vector<int64_t> bias_sizes{weight.size(0)};
  return at::convolution_backward(
      grad,
      x,
      weight,
      at::OptionalIntArrayRef(bias_sizes),
      s.stride,
      padding,
      s.dilation,
      false,
      std::vector<int64_t>(3, 0),
      s.groups,
      wanted);
}

VolumeGradients by_onednn(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const Settings& s,
    at::IntArrayRef padding,
    const Wanted& wanted) {
  if (!is_left_to_windows(x)) {
    return backward(grad, x, weight, s, padding, wanted);
  }
  auto [dx, dweight, dbias] =
      backward(grad, x.to_mkldnn(), weight, s, padding, wanted);
  return {from_onednn(dx), from_onednn(dweight), from_onednn(dbias)};
}

/// The first dim's zeros written out, so that oneDNN need not pad it.
VolumeGradients weight_gradients(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const Settings& s,
    const Wanted& wanted) {
  auto padding = s.padding;
  const int64_t zeros = std::exchange(padding[0], 0);
  const auto rows =
      zeros ? at::constant_pad_nd(x, {0, 0, 0, 0, zeros, zeros}) : x;
  return by_onednn(grad, rows, weight, s, padding, wanted);
}

VolumeGradients fast_backward(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const Settings& s,
    const Wanted& wanted) {
  VolumeGradients result;
  if (wanted[1] || wanted[2]) {
    result =
        weight_gradients(grad, x, weight, s, {false, wanted[1], wanted[2]});
  }
  if (wanted[0]) {
    std::get<0>(result) = std::get<0>(
        by_onednn(grad, x, weight, s, s.padding, {true, false, false}));
  }
  return result;
}

struct VolumeConvBackward : SavedInputsNode {
  VolumeConvBackward(const Tensor& x, const Tensor& weight, Settings settings)
      : SavedInputsNode({x, weight}), settings_(std::move(settings)) {}

  std::string name() const override {
    return "ShardTensorVolumeConvBackward";
  }
  variable_list gradients(
      const Tensor& grad,
      const variable_list& inputs,
      bool differentiable) override {
    const auto& [x, weight] = std::tie(inputs[0], inputs[1]);
    const Wanted wanted{wants(0), wants(1), wants(2)};
    const auto& s = settings_;
    auto [dx, dweight, dbias] = differentiable
        ? backward(grad, x, weight, s, s.padding, wanted)
        : fast_backward(grad, x, weight, s, wanted);
    return {dx, dweight, dbias};
  }

  Settings settings_;
};

} // namespace

bool suits_volume_conv(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias) {
  const bool floats = x.scalar_type() == at::kFloat &&
      weight.scalar_type() == at::kFloat &&
      (!bias.defined() || bias.scalar_type() == at::kFloat);
  const bool one_by_one = // a product of matrices; also where none has channels
      weight.numel() == weight.size(0) * weight.size(1);
  return x.is_cpu() && x.dim() == 5 && floats && !one_by_one &&
      x.numel() > kSmallest && at::globalContext().userEnabledMkldnn() &&
      !is_traced(x) && !has_tangent({x, weight, bias});
}

Tensor volume_conv(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    int64_t groups) {
  auto format = x.suggest_memory_format();
  if (format == at::MemoryFormat::Contiguous) {
    format = weight.suggest_memory_format();
  }
  const auto rows = x.contiguous(format);
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = at::mkldnn_convolution(
        rows,
        weight.contiguous(format),
        bias,
        padding,
        stride,
        dilation,
        groups);
  }
  connect<VolumeConvBackward>(
      output,
      {rows, weight, bias},
      rows,
      weight,
      Settings{stride.vec(), padding.vec(), dilation.vec(), groups});
  return output;
}

} // namespace shardtensor::detail
