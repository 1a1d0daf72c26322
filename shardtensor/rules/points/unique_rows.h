#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace shardtensor::detail {

/// The different ones among keys, ascending.
struct UniqueRows {
  at::Tensor keys; // (M), int64, each once
  at::Tensor inverse; // (N), int64: the place of each given key among them
};

/// Of keys (N), int64, plain or a ShardTensor in any layout. What is
/// cut is cut by all axes of the mesh then, both results. Communication: see
/// collectives/unique_keys.h.
UniqueRows unique_rows(const at::Tensor& keys);

/// Zeros (N, *tail) of `options`, cut as the rows of `like` (N, ...) are.
at::Tensor zero_rows(
    const at::Tensor& like,
    at::IntArrayRef tail,
    const at::TensorOptions& options);

/// A ShardTensor that is cut in any way cut along dim 0 by all axes of its
/// mesh, evenly unless it was; others as they are.
at::Tensor cut_rows(const at::Tensor& given);

} // namespace shardtensor::detail
