#pragma once

#include <cstdint>

#include <ATen/core/TensorBody.h>
#include <c10/util/ArrayRef.h>

#include "shardtensor/comm/check.h"
#include "shardtensor/comm/group.h"

namespace shardtensor::detail {

// What a rank can see of the rows that it tells a collective.

/// Raises unless there is one extent for each rank, none of them negative.
void check_splits(
    const char* op,
    const char* name,
    c10::IntArrayRef splits,
    const Group& group);

/// Raises unless x has that extent in dim.
void check_extent(
    const char* op,
    const at::Tensor& x,
    int64_t dim,
    int64_t expected);

/// Raises unless these integers name rows of x in dim. A device is waited for:
/// it would find a wrong one when the others wait for this rank.
void check_indices(
    const char* op,
    const at::Tensor& indices,
    const at::Tensor& x,
    int64_t dim);

/// A call in which every rank was told the same sizes.
Collective with_sizes(
    const char* op,
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes);

} // namespace shardtensor::detail
