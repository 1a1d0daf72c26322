#include "shardtensor/rules/norm/arguments.h"

#include <numeric>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/layout/reduced_spec.h"

namespace shardtensor::detail {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor norm_input(
    const char* op,
    const Tensor& input,
    std::initializer_list<OptionalTensor> others) {
  c10::SmallVector<Tensor, 5> tensors{input};
  for (const auto& other : others) {
    tensors.push_back(value_or_undefined(other));
  }
  const auto mesh = common_mesh(op, tensors);
  check_promotions(at::ArrayRef<Tensor>(tensors).slice(1), op);
  const auto x = promote_operand(input, mesh, op);
  return autocast_to_float(op, redistribute(x, without_partial(spec(x))));
}

void check_types(
    const char* op,
    const Tensor& x,
    std::initializer_list<OptionalTensor> parameters) {
  for (const auto& given : parameters) {
    const auto parameter = value_or_undefined(given);
    if (!parameter.defined() || autocast_widens(op, parameter)) {
      continue;
    }
    const auto type = parameter.scalar_type();
    TORCH_CHECK(
        type == x.scalar_type() ||
            (type == at::kFloat && at::isReducedFloatingType(x.scalar_type())),
        op,
        ": expected parameters of the input's dtype, ",
        x.scalar_type(),
        ", or in fp32 beside half precision, got ",
        type);
  }
}

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
                   .flatten(at, at + 1)
                   .contiguous(); // PyTorch's kernels take it for that
    }
  }
  return tensor;
}

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

NormGeometry geometry_of(const SpecPtr& x, std::vector<int64_t> dims) {
  NormGeometry geometry;
  geometry.statistics = reduced_spec(x, dims, false, Placement::replicate());
  geometry.axes = axes_of_dims(*x, dims);
  geometry.count = count_over(x->sizes(), dims);
  geometry.dims = std::move(dims);
  return geometry;
}

} // namespace shardtensor::detail
