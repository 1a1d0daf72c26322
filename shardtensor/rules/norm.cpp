#include "shardtensor/rules/norm.h"

#include <limits>
#include <numeric>

#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/instance_norm.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/rms_norm.h>
#include <torch/library.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/rules/autocast.h"
#include "shardtensor/rules/fallback.h"
#include "shardtensor/rules/function_level.h"
#include "shardtensor/rules/promotion.h"
#include "shardtensor/rules/reduction.h"

// Norms at the function level. Where no covered dim is sharded, PyTorch's own
// norm runs on the shards. Otherwise the ranks merge their statistics first.

namespace shardtensor {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- arguments --------------------------------------------------------------

/// The input of a norm on its way to local work: no Partial, the dtype that
/// autocast wants.
Tensor norm_input(const char* op, const Tensor& input, const MeshPtr& mesh) {
  auto x = is_shard_tensor(input) ? input : promote_operand(input, mesh, op);
  x = redistribute(x, without_partial(spec(x)));
  return autocast_to_float(op, x);
}

/// What this rank needs of a plain tensor whose dims are the dims of `spec`
/// from `first` on.
Tensor cut_like(Tensor tensor, const ShardSpec& spec, int64_t first) {
  for (int64_t dim = first; tensor.defined() && dim < first + tensor.dim();
       ++dim) {
    if (!spec.is_sharded(dim)) {
      continue;
    }
    const auto& partition = spec.partition(dim);
    const auto own = spec.interval(dim);
    const auto at = dim - first;
    if (partition.is_contiguous()) {
      tensor = tensor.narrow(at, own.begin, own.extent());
    } else {
      tensor = tensor.unflatten(at, {partition.repeat(), partition.period()})
                   .narrow(at + 1, own.begin, own.extent())
                   .flatten(at, at + 1);
    }
  }
  return tensor;
}

struct Affine {
  Tensor weight;
  Tensor bias;
};

/// Weight and bias for this rank's elements; `first` is the dim of the input
/// that their first dim belongs to. One message for both gradients.
Affine local_affine(
    const char* op,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    const ShardSpec& x,
    int64_t first) {
  const auto shared = shared_weights(
      {autocast_to_float(op, value_or_undefined(weight)),
       autocast_to_float(op, value_or_undefined(bias))},
      x.mesh(),
      x.sharded_axes());
  return {cut_like(shared[0], x, first), cut_like(shared[1], x, first)};
}

/// A per-channel tensor as one that broadcasts with (N, C, ...).
Tensor per_channel(const Tensor& tensor, int64_t dims) {
  if (!tensor.defined()) {
    return tensor;
  }
  std::vector<int64_t> sizes(dims - 1, 1);
  sizes[0] = tensor.numel();
  return tensor.reshape(sizes);
}

void check_channels(
    const char* op,
    const char* what,
    const OptionalTensor& tensor,
    int64_t channels) {
  TORCH_CHECK(
      !tensor || !tensor->defined() ||
          (tensor->dim() == 1 && tensor->size(0) == channels),
      op,
      ": expected ",
      what,
      " of sizes [",
      channels,
      "], got ",
      tensor->sizes());
}

std::vector<int64_t> dims_from(int64_t first, int64_t end) {
  std::vector<int64_t> dims(std::max<int64_t>(end - first, 0));
  std::iota(dims.begin(), dims.end(), first);
  return dims;
}

int64_t count_of(
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t dim : dims) {
    count *= sizes[dim];
  }
  return count;
}

NormGeometry geometry_of(const SpecPtr& x, std::vector<int64_t> dims) {
  NormGeometry geometry;
  geometry.statistics = reduced_spec(x, dims, false, Placement::replicate());
  geometry.axes = axes_of_dims(*x, dims);
  geometry.count = count_of(x->sizes(), dims);
  geometry.dims = std::move(dims);
  return geometry;
}

// ---- group norm -------------------------------------------------------------

/// True when no group is cut.
bool holds_whole_groups(const ShardSpec& spec, int64_t channels_per_group) {
  if (!spec.is_sharded(1)) {
    return true;
  }
  const auto& partition = spec.partition(1);
  for (const int64_t offset : partition.offsets()) {
    if (offset % channels_per_group != 0) {
      return false;
    }
  }
  return partition.is_contiguous();
}

/// The layout of one statistic per sample and group.
SpecPtr group_statistics(
    const SpecPtr& x,
    int64_t groups,
    int64_t channels_per_group) {
  ShardSpec::Partitions partitions(2);
  partitions[0] = x->partitions()[0];
  if (x->is_sharded(1)) {
    auto sizes = x->partition(1).sizes();
    for (auto& size : sizes) {
      size /= channels_per_group;
    }
    partitions[1] = Partition(sizes);
  }
  auto placements = x->placements();
  for (auto& placement : placements) {
    if (placement.is_shard() && placement.dim > 1) {
      placement = Placement::replicate();
    }
  }
  return make_spec(
      x->mesh(), {x->size(0), groups}, placements, std::move(partitions));
}

Tensor sharded_group_norm(
    const Tensor& local,
    const SpecPtr& x,
    int64_t groups,
    const Affine& affine,
    double eps) {
  const auto per_group = x->size(1) / groups;
  const auto local_groups = local.size(1) / per_group;
  auto geometry = geometry_of(x, dims_from(2, x->dim()));
  geometry.count *= per_group;
  geometry.statistics = group_statistics(x, groups, per_group);
  geometry.dims = dims_from(2, x->dim() + 1);
  const auto split = [&](const Tensor& tensor) {
    return tensor.defined()
        ? per_channel(tensor, x->dim()).unflatten(0, {local_groups, per_group})
        : tensor;
  };
  const auto view = local.unflatten(1, {local_groups, per_group});
  return normalize(
             view,
             split(affine.weight),
             split(affine.bias),
             norm_moments(view, geometry),
             eps,
             geometry)
      .flatten(1, 2);
}

Tensor group_norm_rule(
    const Tensor& input,
    int64_t groups,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    double eps,
    bool cudnn_enabled) {
  const auto w = value_or_undefined(weight);
  const auto b = value_or_undefined(bias);
  if (is_transformed({input, w, b})) {
    const BelowFunctionLevel below;
    return at::group_norm(input, groups, weight, bias, eps, cudnn_enabled);
  }
  constexpr auto op = "aten::group_norm";
  const CommScope scope(op);
  auto x = norm_input(op, input, common_mesh(op, {input, w, b}));
  TORCH_CHECK(
      x.dim() >= 2,
      "group_norm: expected an input of at least 2 dims, got sizes ",
      x.sizes());
  TORCH_CHECK(
      groups > 0 && x.size(1) % groups == 0,
      "group_norm: expected a number of groups that divides the ",
      x.size(1),
      " channels, got ",
      groups);
  check_channels("group_norm", "weight", weight, x.size(1));
  check_channels("group_norm", "bias", bias, x.size(1));
  if (!holds_whole_groups(*spec(x), x.size(1) / groups)) {
    const auto whole = without_shard(spec(x), 1);
    note_fallback(op, spec(x), whole);
    x = redistribute(x, whole);
  }
  const auto layout = spec(x);
  const auto affine = local_affine(op, weight, bias, *layout, 1);
  const auto local = to_local(x);
  const auto per_group = x.size(1) / groups;
  const bool is_local =
      axes_of_dims(*layout, dims_from(2, x.dim())).empty() && local.numel() > 0;
  return from_local(
      is_local || x.numel() == 0
          ? at::group_norm(
                local,
                local.size(1) / per_group,
                affine.weight,
                affine.bias,
                eps,
                cudnn_enabled)
          : sharded_group_norm(local, layout, groups, affine, eps),
      layout);
}

// ---- layer norm and root mean square norm -----------------------------------

/// The number of dims that stay, after checking what the norm covers.
int64_t check_normalized_shape(
    const char* op,
    const Tensor& x,
    at::IntArrayRef shape,
    const OptionalTensor& weight,
    const OptionalTensor& bias) {
  const auto covered = static_cast<int64_t>(shape.size());
  TORCH_CHECK(
      covered > 0 && covered <= x.dim() &&
          x.sizes().slice(x.dim() - covered) == shape,
      op,
      ": expected an input whose last dims are normalized_shape ",
      shape,
      ", got sizes ",
      x.sizes());
  for (const auto* affine : {&weight, &bias}) {
    TORCH_CHECK(
        !*affine || !(*affine)->defined() || (*affine)->sizes() == shape,
        op,
        ": expected weight and bias of normalized_shape ",
        shape,
        ", got sizes ",
        (*affine)->sizes());
  }
  return x.dim() - covered;
}

Tensor layer_norm_rule(
    const Tensor& input,
    at::IntArrayRef normalized_shape,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    double eps,
    bool cudnn_enable) {
  const auto w = value_or_undefined(weight);
  const auto b = value_or_undefined(bias);
  if (is_transformed({input, w, b})) {
    const BelowFunctionLevel below;
    return at::layer_norm(
        input, normalized_shape, weight, bias, eps, cudnn_enable);
  }
  constexpr auto op = "aten::layer_norm";
  const CommScope scope(op);
  const auto x = norm_input(op, input, common_mesh(op, {input, w, b}));
  const auto first =
      check_normalized_shape("layer_norm", x, normalized_shape, weight, bias);
  const auto layout = spec(x);
  const auto geometry = geometry_of(layout, dims_from(first, x.dim()));
  const auto affine = local_affine(op, weight, bias, *layout, first);
  const auto local = to_local(x);
  return from_local(
      geometry.axes.empty() || x.numel() == 0
          ? at::layer_norm(
                local,
                local.sizes().slice(first),
                affine.weight,
                affine.bias,
                eps,
                cudnn_enable)
          : normalize(
                local,
                affine.weight,
                affine.bias,
                norm_moments(local, geometry),
                eps,
                geometry),
      layout);
}

/// rms_norm tells an absent weight from an undefined one.
OptionalTensor optional_of(const Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

double default_eps(at::ScalarType dtype) {
  return dtype == at::kDouble ? std::numeric_limits<double>::epsilon()
                              : std::numeric_limits<float>::epsilon();
}

/// Complex numbers have no sharded path: the covered dims are gathered.
Tensor without_sharded_complex(const char* op, const Tensor& x, int64_t first) {
  auto wanted = spec(x);
  for (int64_t dim = first; x.is_complex() && dim < x.dim(); ++dim) {
    wanted = wanted->is_sharded(dim) ? without_shard(wanted, dim) : wanted;
  }
  if (wanted != spec(x)) {
    note_fallback(op, spec(x), wanted);
  }
  return redistribute(x, wanted);
}

Tensor rms_norm_rule(
    const Tensor& input,
    at::IntArrayRef normalized_shape,
    const OptionalTensor& weight,
    std::optional<double> eps) {
  const auto w = value_or_undefined(weight);
  if (is_transformed({input, w})) {
    const BelowFunctionLevel below;
    return at::rms_norm(input, normalized_shape, weight, eps);
  }
  constexpr auto op = "aten::rms_norm";
  const CommScope scope(op);
  auto x = norm_input(op, input, common_mesh(op, {input, w}));
  const auto first =
      check_normalized_shape("rms_norm", x, normalized_shape, weight, {});
  x = without_sharded_complex(op, x, first);
  const auto layout = spec(x);
  auto geometry = geometry_of(layout, dims_from(first, x.dim()));
  geometry.centered = false;
  const auto affine = local_affine(op, weight, {}, *layout, first);
  const auto local = to_local(x);
  return from_local(
      geometry.axes.empty() || x.numel() == 0
          ? at::rms_norm(
                local,
                local.sizes().slice(first),
                optional_of(affine.weight),
                eps)
          : normalize(
                local,
                affine.weight,
                {},
                norm_moments(local, geometry),
                eps.value_or(default_eps(x.scalar_type())),
                geometry),
      layout);
}

// ---- batch norm and instance norm -------------------------------------------

/// Running statistics: plain, equal on all ranks. Of a ShardTensor the local
/// tensor, which must be whole.
Tensor running_buffer(const char* op, const OptionalTensor& running) {
  if (!running || !running->defined() || !is_shard_tensor(*running)) {
    return value_or_undefined(running);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec(*running)->is_replicated(),
      op,
      ": expected running statistics that are plain or Replicate, got ",
      to_string(*spec(*running)));
  return to_local(running->detach());
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
    const NormMoments& moments,
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

/// With running statistics. PyTorch's own does not take an empty shard.
Tensor evaluated_norm(
    const Tensor& local,
    const Affine& affine,
    const Running& running,
    double eps,
    bool cudnn_enabled) {
  if (local.numel() > 0) {
    return at::batch_norm(
        local,
        affine.weight,
        affine.bias,
        running.mean,
        running.var,
        false,
        0.0,
        eps,
        cudnn_enabled);
  }
  const auto dims = local.dim();
  auto result = local * per_channel((running.var + eps).rsqrt(), dims);
  if (affine.weight.defined()) {
    result = result * per_channel(affine.weight, dims);
  }
  if (affine.bias.defined()) {
    result = result + per_channel(affine.bias, dims);
  }
  return result.to(local.scalar_type());
}

Tensor batch_norm_rule(
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    bool training,
    double momentum,
    double eps,
    bool cudnn_enabled) {
  const auto w = value_or_undefined(weight);
  const auto b = value_or_undefined(bias);
  if (is_transformed({input, w, b})) {
    const BelowFunctionLevel below;
    return at::batch_norm(
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
  constexpr auto op = "aten::batch_norm";
  const CommScope scope(op);
  const auto x = norm_input(op, input, common_mesh(op, {input, w, b}));
  TORCH_CHECK(
      x.dim() >= 2,
      "batch_norm: expected an input of at least 2 dims, got sizes ",
      x.sizes());
  check_channels("batch_norm", "weight", weight, x.size(1));
  check_channels("batch_norm", "bias", bias, x.size(1));
  check_channels("batch_norm", "running_mean", running_mean, x.size(1));
  check_channels("batch_norm", "running_var", running_var, x.size(1));
  const Running running{
      running_buffer(op, running_mean), running_buffer(op, running_var)};
  TORCH_CHECK(
      training || (running.mean.defined() && running.var.defined()),
      "batch_norm: expected running_mean and running_var when it is not in "
      "training");
  const auto layout = spec(x);
  const auto affine = local_affine(op, weight, bias, *layout, 1);
  const auto local = to_local(x);
  if (!training) {
    const Running own{
        cut_like(running.mean, *layout, 1), cut_like(running.var, *layout, 1)};
    return from_local(
        evaluated_norm(local, affine, own, eps, cudnn_enabled), layout);
  }
  if (layout->is_replicated() || x.numel() == 0) {
    return from_local(
        at::batch_norm(
            local,
            affine.weight,
            affine.bias,
            running.mean,
            running.var,
            true,
            momentum,
            eps,
            cudnn_enabled),
        layout);
  }
  auto dims = dims_from(1, x.dim());
  dims[0] = 0;
  const auto geometry = geometry_of(layout, dims);
  const auto moments = norm_moments(local, geometry);
  update_running(running, momentum, moments, geometry);
  return from_local(
      normalize(
          local,
          per_channel(affine.weight, x.dim()),
          per_channel(affine.bias, x.dim()),
          moments,
          eps,
          geometry),
      layout);
}

Tensor instance_norm_rule(
    const Tensor& input,
    const OptionalTensor& weight,
    const OptionalTensor& bias,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    bool use_input_stats,
    double momentum,
    double eps,
    bool cudnn_enabled) {
  const auto w = value_or_undefined(weight);
  const auto b = value_or_undefined(bias);
  if (is_transformed({input, w, b})) {
    const BelowFunctionLevel below;
    return at::instance_norm(
        input,
        weight,
        bias,
        running_mean,
        running_var,
        use_input_stats,
        momentum,
        eps,
        cudnn_enabled);
  }
  constexpr auto op = "aten::instance_norm";
  const CommScope scope(op);
  const auto x = norm_input(op, input, common_mesh(op, {input, w, b}));
  TORCH_CHECK(
      x.dim() >= 2,
      "instance_norm: expected an input of at least 2 dims, got sizes ",
      x.sizes());
  check_channels("instance_norm", "weight", weight, x.size(1));
  check_channels("instance_norm", "bias", bias, x.size(1));
  check_channels("instance_norm", "running_mean", running_mean, x.size(1));
  check_channels("instance_norm", "running_var", running_var, x.size(1));
  const Running running{
      running_buffer(op, running_mean), running_buffer(op, running_var)};
  TORCH_CHECK(
      use_input_stats || (running.mean.defined() && running.var.defined()),
      "instance_norm: expected running_mean and running_var when "
      "use_input_stats is false");
  const auto layout = spec(x);
  const auto affine = local_affine(op, weight, bias, *layout, 1);
  const auto local = to_local(x);
  if (!use_input_stats) {
    const Running own{
        cut_like(running.mean, *layout, 1), cut_like(running.var, *layout, 1)};
    return from_local(
        evaluated_norm(local, affine, own, eps, cudnn_enabled), layout);
  }
  const auto geometry = geometry_of(layout, dims_from(2, x.dim()));
  const auto moments = norm_moments(local, geometry);
  update_running(running, momentum, moments, geometry);
  return from_local(
      normalize(
          local,
          per_channel(affine.weight, x.dim()),
          per_channel(affine.bias, x.dim()),
          moments,
          eps,
          geometry),
      layout);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("group_norm", group_norm_rule);
  m.impl("layer_norm", layer_norm_rule);
  m.impl("rms_norm", rms_norm_rule);
  m.impl("batch_norm", batch_norm_rule);
  m.impl("instance_norm", instance_norm_rule);
}

} // namespace shardtensor
