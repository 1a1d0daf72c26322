#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "shardtensor/halo/stencil.h"

namespace shardtensor::detail {

// Note [Lone columns]
// With AMX, oneDNN (3.12) leaves results in bf16 unwritten where a strided
// convolution makes one column: the output of a volume's, the gradient of the
// weight wherever that dim is padded, and those of a transposed convolution of
// one column. Whole images and volumes are hardly ever that thin; pieces and
// the rows at their edges are. So two columns are made, of which the second
// reads zeros and is dropped.

/// Whether that concerns convolutions of x.
inline bool may_leave_columns(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kBFloat16;
}

/// And one with `stride` along the last dim that makes `columns` of it, or,
/// transposed, takes them.
inline bool is_lone_column(
    const at::Tensor& x,
    int64_t columns,
    int64_t stride) {
  return columns == 1 && stride > 1 && may_leave_columns(x);
}

at::Tensor with_zero_columns(const at::Tensor& x, int64_t count);

/// convolve(x), which has the window `last` along the last dim, with a second
/// column where it needs one.
at::Tensor convolve_columns(
    const at::Tensor& x,
    const Window& last,
    bool transposed,
    c10::function_ref<at::Tensor(const at::Tensor&)> convolve);

} // namespace shardtensor::detail
