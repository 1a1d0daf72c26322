#pragma once

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/points/layouts.h"

namespace shardtensor::detail {

/// Rows of a cloud whose pieces (B, n, ...) are on the ranks of a group:
/// entry[i]'s row rows[i], both int64 of one dim; zeros where rows[i] is -1.
/// Differentiable to any order. Communication: where several ranks have the
/// points a number for each pair of ranks, the places of rows that another rank
/// has, each once, and those rows; backward their gradients. For a compiler:
/// all rows.
at::Tensor rows_of_cloud(
    const at::Tensor& piece,
    const at::Tensor& entries,
    const at::Tensor& rows,
    const CloudPieces& cloud);

} // namespace shardtensor::detail
