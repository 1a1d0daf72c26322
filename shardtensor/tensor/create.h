#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// As at::zeros, at::ones, at::full and at::empty of spec's global sizes, each
/// rank making its own piece; random numbers are in random.h. The result is a
/// leaf. No communication. Raises for a Partial placement.
at::Tensor zeros(const SpecPtr& spec, const at::TensorOptions& options = {});
at::Tensor ones(const SpecPtr& spec, const at::TensorOptions& options = {});
at::Tensor full(
    const SpecPtr& spec,
    const at::Scalar& value,
    const at::TensorOptions& options = {});
at::Tensor empty(const SpecPtr& spec, const at::TensorOptions& options = {});

namespace detail {
/// Raises unless a factory, called `op`, can make a tensor of this layout.
void check_made(const char* op, const SpecPtr& spec);
} // namespace detail

} // namespace shardtensor
