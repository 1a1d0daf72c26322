#include "shardtensor/rules/stencil/plan_tensors.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "shardtensor/comm/plain_tensors.h"
#include "shardtensor/layout/plans/plan_cache.h"

namespace shardtensor::detail {
namespace {

// Note [Plan tensors on devices]
// Numbers of the host come to a device by a copy that waits for all that the
// device has to do. A plan's numbers are the same in every step: they stay
// there, made outside of whatever modes and transforms the call is in.
template <typename T>
at::Tensor make_tensor(
    at::ArrayRef<T> values,
    const at::TensorOptions& options) {
  const auto make = [&] { return at::tensor(values, options); };
  if (options.device().is_cpu()) {
    return make();
  }
  static PlanCache<at::Tensor> tensors;
  PlanKey key;
  key.add(static_cast<int64_t>(options.device().type()))
      .add(static_cast<int64_t>(options.device().index()))
      .add(static_cast<int64_t>(c10::typeMetaToScalarType(options.dtype())));
  for (const T value : values) {
    key.add(value);
  }
  return *tensors.find(key, [&] {
    const OnPlainTensors plain;
    const c10::InferenceMode no_inference(false);
    return make();
  });
}

at::Tensor make_indices(at::IntArrayRef values, const at::Tensor& like) {
  return make_tensor(values, like.options().dtype(at::kLong));
}

at::Tensor make_weights(at::ArrayRef<double> values, const at::Tensor& like) {
  return make_tensor(values, like.options());
}

at::Tensor meta_indices(at::IntArrayRef values, const at::Tensor& like) {
  return at::empty(
      {static_cast<int64_t>(values.size())}, like.options().dtype(at::kLong));
}

at::Tensor meta_weights(at::ArrayRef<double> values, const at::Tensor& like) {
  return at::empty({static_cast<int64_t>(values.size())}, like.options());
}

} // namespace

at::Tensor index_tensor(
    const std::vector<int64_t>& values,
    const at::Tensor& like) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("shardtensor::index_tensor", "")
          .typed<at::Tensor(at::IntArrayRef, const at::Tensor&)>();
  return op.call(values, like.detach());
}

at::Tensor weight_tensor(
    const std::vector<double>& values,
    const at::Tensor& like) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("shardtensor::weight_tensor", "")
          .typed<at::Tensor(at::ArrayRef<double>, const at::Tensor&)>();
  return op.call(values, like.detach());
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("index_tensor", make_indices);
  m.impl("weight_tensor", make_weights);
}

TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("index_tensor", meta_indices);
  m.impl("weight_tensor", meta_weights);
}

} // namespace shardtensor::detail
