#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor {

/// Whether this is a tensor of a torch.func transform, which calls the operator
/// again on what is inside: nothing for a function-level rule.
inline bool is_transformed(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has_any(kTransformKeys);
}

namespace detail {

/// A ShardTensor's layout, also inside of transforms, where vmap's dims are
/// left out; null for plain tensors. See Note [Transforms].
SpecPtr layout_of(const at::Tensor& tensor);
/// The same; raises for plain tensors.
SpecPtr spec_inside(const at::Tensor& tensor);

/// A spec for the operators of a transform, which take its place in a list: it
/// is there while this lives. Null is a spec, too.
class SpecOfCall {
 public:
  explicit SpecOfCall(SpecPtr spec);
  ~SpecOfCall();
  SpecOfCall(const SpecOfCall&) = delete;
  SpecOfCall& operator=(const SpecOfCall&) = delete;

  int64_t place() const {
    return place_;
  }

 private:
  int64_t place_;
};

/// Raises where no call of this thread put one there.
SpecPtr spec_of_call(int64_t place);

} // namespace detail
} // namespace shardtensor
