#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {

// What dispatch-level kernels are made of. A kernel is an ordinary function
// with the operator's C++ signature, registered on SHARDTENSOR_DISPATCH_KEY,
// for an operator that a rule (rule.h) cannot serve: it communicates on the
// way, or what it does depends on values. It runs below autograd: local_of() ->
// plain ATen and communication -> wrap(); ATen's derivative formula runs above
// it, and its operators need rules themselves.

/// This rank's part of a tensor, and where its elements are.
struct Local {
  at::Tensor tensor;
  SpecPtr spec;
};

/// The part of a ShardTensor, a Partial reduced first. Communication: none
/// without a Partial, else a redistribution.
Local local_of(const at::Tensor& tensor);

/// The part in the layout `wanted`; a plain tensor counts as Replicate.
/// Communication: that of redistribute_local.
Local local_of(const at::Tensor& tensor, const SpecPtr& wanted);

/// A ShardTensor's elements become those of `local`, laid out as `spec`, of the
/// same global sizes. A Partial takes that layout, unless others look at its
/// memory. Communication: that of redistribute_local.
void write_local(
    const at::Tensor& tensor,
    const at::Tensor& local,
    const SpecPtr& spec);

/// The part of a ShardTensor in the layout `wanted`, for an in-place kernel:
/// what is written into it reaches the tensor with finish().
class LocalToWrite {
 public:
  LocalToWrite(const at::Tensor& tensor, SpecPtr wanted);

  const at::Tensor& local() const {
    return local_;
  }
  /// Communication: none where the tensor lies as `wanted`, else a
  /// redistribution.
  void finish() const;

 private:
  at::Tensor tensor_;
  SpecPtr wanted_;
  at::Tensor local_;
};

} // namespace shardtensor
