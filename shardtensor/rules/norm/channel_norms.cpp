#include <string>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/instance_norm_ops.h>
#include <ATen/ops/mean.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/norm/arguments.h"

// Norms of each channel at the function level, with running statistics.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// A running statistic, plain, whole and equal on all ranks. Of a ShardTensor
/// in another layout a copy: see keep_running. Communication: none for a plain
/// or Replicate one.
Tensor running_buffer(const OptionalTensor& running) {
  return running && running->defined() && is_shard_tensor(*running)
      ? full_tensor(running->detach())
      : value_or_undefined(running);
}

/// What a norm has written into `whole` reaches the buffer it was made from.
void keep_running(const OptionalTensor& running, const Tensor& whole) {
  if (running && running->defined() && is_shard_tensor(*running) &&
      !spec(*running)->is_replicated()) {
    const at::NoGradGuard no_grad;
    running->copy_(promote(whole, spec(*running)->mesh()));
  }
}

struct Running {
  Tensor mean;
  Tensor var;
};

/// running = (1 - momentum) * running + momentum * (what the input has), with
/// the unbiased variance. The statistics of instance norm are averaged over
/// the samples. Communication: only where channels or samples are sharded.
void update_running(
    const Running& running,
    double momentum,
    const Moments& moments,
    const NormGeometry& geometry) {
  const at::NoGradGuard no_grad;
  const auto update = [&](const Tensor& buffer, const Tensor& local) {
    if (!buffer.defined()) {
      return;
    }
    const auto& layout = geometry.statistics;
    auto found = wrap(local.view(layout->local_sizes()), layout);
    if (found.dim() == 2) {
      found = at::mean(found, at::IntArrayRef{0});
    }
    const auto whole = full_tensor(found).to(buffer.scalar_type());
    buffer.mul_(1 - momentum).add_(whole, momentum);
  };
  update(running.mean, moments.mean);
  update(
      running.var,
      moments.squares / at::Scalar(static_cast<double>(geometry.count - 1)));
}

/// One element in each empty dim.
Tensor without_empty_dims(const Tensor& tensor, double value) {
  if (!tensor.defined() || tensor.numel() > 0) {
    return tensor;
  }
  std::vector<int64_t> padding; // the last dim first
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    padding.push_back(0);
    padding.push_back(tensor.size(dim) == 0 ? 1 : 0);
  }
  return at::constant_pad_nd(tensor, padding, value);
}

/// With running statistics. PyTorch's own does not take an empty shard; and
/// what autograd records must not depend on the piece, or a rank has nothing to
/// differentiate where others wait for its message.
Tensor evaluated_norm(
    const Tensor& local,
    const Affine& affine,
    const Running& running,
    double eps,
    bool cudnn_enabled) {
  auto result = at::batch_norm(
      without_empty_dims(local, 0),
      without_empty_dims(affine.weight, 1),
      without_empty_dims(affine.bias, 0),
      without_empty_dims(running.mean, 0),
      without_empty_dims(running.var, 1),
      false,
      0.0,
      eps,
      cudnn_enabled);
  for (int64_t dim = 0; dim < local.dim(); ++dim) {
    if (local.size(dim) == 0) {
      result = result.narrow(dim, 0, 0);
    }
  }
  return result;
}

/// The arguments beside the input, each with one element per channel.
struct PerChannel {
  const OptionalTensor& weight;
  const OptionalTensor& bias;
  const OptionalTensor& running_mean;
  const OptionalTensor& running_var;
};

/// The arguments of a norm of each channel, checked, as this rank needs them.
struct ChannelNorm {
  SpecPtr layout;
  at::MemoryFormat format; // of the result
  Tensor local;
  Affine affine;
  Running running;
};

/// `op` is "aten::batch_norm"; `when` says when running statistics are needed.
ChannelNorm channel_norm(
    const std::string& op,
    const Tensor& input,
    const PerChannel& given,
    bool uses_input,
    const char* when) {
  const auto x = norm_input(
      op.c_str(),
      input,
      {given.weight, given.bias, given.running_mean, given.running_var});
  const auto name = op.substr(op.find("::") + 2);
  TORCH_CHECK(
      x.dim() >= 2,
      name,
      ": expected an input of at least 2 dims, got sizes ",
      x.sizes());
  const auto check = [&](const char* what, const OptionalTensor& tensor) {
    check_channels(name.c_str(), what, tensor, x.size(1));
  };
  check("weight", given.weight);
  check("bias", given.bias);
  check("running_mean", given.running_mean);
  check("running_var", given.running_var);
  check_types(
      op.c_str(),
      x,
      {given.weight, given.bias, given.running_mean, given.running_var});
  const Running running{
      running_buffer(given.running_mean), running_buffer(given.running_var)};
  TORCH_CHECK(
      uses_input || (running.mean.defined() && running.var.defined()),
      name,
      ": expected running_mean and running_var when ",
      when);
  const auto layout = spec(x);
  return {
      layout,
      x.suggest_memory_format(),
      to_local(x),
      local_affine(op.c_str(), given.weight, given.bias, *layout, 1),
      running};
}

/// With running statistics.
Tensor evaluated(const ChannelNorm& norm, double eps, bool cudnn_enabled) {
  const Running own{
      cut_like(norm.running.mean, *norm.layout, 1),
      cut_like(norm.running.var, *norm.layout, 1)};
  return from_local(
      evaluated_norm(norm.local, norm.affine, own, eps, cudnn_enabled),
      norm.layout,
      norm.format);
}

void keep_running(const PerChannel& given, const Running& running) {
  keep_running(given.running_mean, running.mean);
  keep_running(given.running_var, running.var);
}

/// With the statistics of the input over `dims`, which the running ones learn.
Tensor normalized(
    const ChannelNorm& norm,
    std::vector<int64_t> dims,
    double momentum,
    double eps) {
  const auto count = norm.local.dim();
  const auto geometry = geometry_of(norm.layout, std::move(dims));
  const auto moments = norm_moments(norm.local, geometry);
  update_running(norm.running, momentum, moments, geometry);
  return from_local(
      normalize(
          norm.local,
          per_channel(norm.affine.weight, count),
          per_channel(norm.affine.bias, count),
          moments,
          eps,
          geometry),
      norm.layout,
      norm.format);
}

/// Likewise, of a batch; PyTorch's own on the whole one.
Tensor normalized_batch(
    const ChannelNorm& norm,
    double momentum,
    double eps,
    bool cudnn_enabled) {
  if (!norm.layout->is_replicated() && norm.layout->numel() > 0) {
    auto dims = dims_from(1, norm.layout->dim());
    dims[0] = 0;
    return normalized(norm, dims, momentum, eps);
  }
  return from_local(
      at::batch_norm(
          norm.local,
          norm.affine.weight,
          norm.affine.bias,
          norm.running.mean,
          norm.running.var,
          true,
          momentum,
          eps,
          cudnn_enabled),
      norm.layout,
      norm.format);
}

Tensor batch_norm_function(
    c10::DispatchKeySet keys,
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    bool training,
    double momentum,
    double eps,
    bool cudnn_enabled) {
  if (input.dim() < 2 && input.numel() == 0) { // nothing to normalize
    return without_rule<at::_ops::batch_norm>(
        keys,
        input,
        weight,
        bias,
        running_mean,
        running_var,
        training,
        momentum,
        eps,
        cudnn_enabled);
  }
  const PerChannel given{weight, bias, running_mean, running_var};
  const auto norm = channel_norm(
      "aten::batch_norm", input, given, training, "it is not in training");
  if (!training) {
    return evaluated(norm, eps, cudnn_enabled);
  }
  const auto result = normalized_batch(norm, momentum, eps, cudnn_enabled);
  keep_running(given, norm.running);
  return result;
}

Tensor instance_norm_function(
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    bool use_input_stats,
    double momentum,
    double eps,
    bool cudnn_enabled) {
  const PerChannel given{weight, bias, running_mean, running_var};
  auto norm = channel_norm(
      "aten::instance_norm",
      input,
      given,
      use_input_stats,
      "use_input_stats is false");
  norm.format = at::MemoryFormat::Contiguous;
  if (!use_input_stats) {
    return evaluated(norm, eps, cudnn_enabled);
  }
  const auto result =
      normalized(norm, dims_from(2, norm.layout->dim()), momentum, eps);
  keep_running(given, norm.running);
  return result;
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "batch_norm", function_rule<at::_ops::batch_norm, batch_norm_function>);
  m.impl(
      "instance_norm",
      function_rule<at::_ops::instance_norm, instance_norm_function>);
}

} // namespace shardtensor::detail
