#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

// Note [Lone columns]
// With AMX, oneDNN (3.12) leaves results in bf16 unwritten
// where a strided convolution makes one column: the output of a volume's, the
// gradient of the weight wherever that dim is padded, and those of a transposed
// convolution of one column. Whole images and volumes are hardly ever that
// thin; pieces and the rows at their edges are. So two columns are made, of
// which the second reads zeros and is dropped.

/// Whether a convolution with `stride` along the last dim that makes `columns`
/// (a transposed one: takes them) from `x` must not be left to oneDNN as it is.
bool is_lone_column(const at::Tensor& x, int64_t columns, int64_t stride);

at::Tensor with_zero_columns(const at::Tensor& x, int64_t count);

} // namespace shardtensor::detail
