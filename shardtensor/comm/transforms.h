#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardtensor::detail {

// Note [Transforms]
// torch.func's transforms wrap tensors, one level around the other, and take
// operators apart level by level: each is called again on what is inside. Our
// functions that are no operators meet the wrappers themselves. What they
// differentiate goes through operators, which the levels record; what the host
// reads to plan (indices, which points are near) has no derivative and is read
// from inside.

/// While it lives operators on tensors that no transform wraps give such: what
/// is constant for all levels.
struct OutsideTransforms {
  c10::impl::ExcludeDispatchKeyGuard no_transforms{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode})};
};

/// Without the levels that differentiate around it.
at::Tensor without_levels(at::Tensor tensor);

/// All samples of a vmap, and the dim along which they stand.
struct Samples {
  at::Tensor values;
  int64_t dim;
};
/// None of another tensor.
std::optional<Samples> samples_of(const at::Tensor& tensor);

/// Without any level, and so with the dims of vmap's: what holds of all
/// samples.
at::Tensor values_inside(at::Tensor tensor);

/// Raises where a level is around the tensor, which messages cannot take.
void check_not_transformed(const char* op, const at::Tensor& tensor);

/// What the host may read. Raises for what vmap batches: it has a value for
/// each sample.
at::Tensor value_inside(const at::Tensor& tensor);

} // namespace shardtensor::detail
