#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// As at::rand and at::randn of spec's global sizes: the numbers of one device
/// with the same seed, in any layout, when the ranks' generators are in the
/// same state. Each rank draws for the whole tensor and keeps its part. The
/// result is a leaf. No communication. Raises for a Partial placement.
at::Tensor rand(const SpecPtr& spec, const at::TensorOptions& options = {});
at::Tensor randn(const SpecPtr& spec, const at::TensorOptions& options = {});

} // namespace shardtensor
