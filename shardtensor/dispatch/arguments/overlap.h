#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace shardtensor::detail {

// Note [Overlap]
// PyTorch's kernels refuse to write into a tensor several of whose elements lie
// in one place, as those of x.expand() do, and to read what they overwrite.
// What they would see in local tensors differs between ranks: nothing in an
// empty piece. So the first is looked for in the nominal strides. The second is
// never seen: what is read is copied before.

/// PyTorch's error of writing into a tensor some elements of which lie in one
/// place.
void check_places_apart(const std::string& op, const at::Tensor& tensor);

/// The same of all ShardTensors that a call writes into, unless it is one of
/// the few that may.
void check_written_once(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack);

/// `source` to be read while `target` is written, both local: a copy where they
/// overlap in part.
at::Tensor readable_beside(const at::Tensor& source, const at::Tensor& target);

} // namespace shardtensor::detail
