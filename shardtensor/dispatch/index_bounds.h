#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Note [Indices out of bounds]
// Each rank works with a part of an index, and would raise alone where only its
// part is out of bounds: the others would wait for it. So the whole index is
// checked first, on CPUs; elsewhere PyTorch does not raise either.

/// Raises on every rank where `index` leaves [0, extent), or [-extent, extent).
/// Communication: an all-reduce of two numbers where the index is cut.
void check_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent,
    bool may_be_negative = false);

/// The same where PyTorch raises a RuntimeError: gather, scatter and unpooling.
void check_gather_index(
    const std::string& op,
    const at::Tensor& index,
    int64_t dim,
    int64_t extent);

} // namespace shardtensor::detail
