#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// From the rows of one rank's piece to rows of the tensor.

/// Partition::global_row of every element.
at::Tensor global_rows(
    const at::Tensor& local,
    const Partition& partition,
    int64_t piece);
/// The same for what `position` owns of `dim`, which may be whole.
at::Tensor global_rows(
    const at::Tensor& local,
    const ShardSpec& spec,
    int64_t dim,
    int64_t position);
/// What this rank owns of `dim`, of the type in `options`.
at::Tensor own_rows(
    const ShardSpec& spec,
    int64_t dim,
    const at::TensorOptions& options);

/// Row-major indices into a piece of sizes `from` as row-major indices into a
/// tensor of sizes `to`; row_of says which row of `to` a row of dim i is.
///
/// Example: index 3 of a (2, 2) piece is row 1, column 1. Are its columns the
/// last two of a (2, 5) tensor, it becomes 1 * 5 + 4 = 9.
at::Tensor flat_indices(
    const at::Tensor& local,
    const std::vector<int64_t>& from,
    const std::vector<int64_t>& to,
    const std::function<at::Tensor(int64_t dim, const at::Tensor& rows)>&
        row_of);
/// The same for what `position` owns of a tensor laid out as `spec`.
at::Tensor flat_indices(
    const at::Tensor& local,
    const ShardSpec& spec,
    int64_t position);

} // namespace shardtensor::detail
