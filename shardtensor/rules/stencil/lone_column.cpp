#include "shardtensor/rules/stencil/lone_column.h"

#include <array>

#include <ATen/ops/constant_pad_nd.h>

namespace shardtensor::detail {

bool is_lone_column(const at::Tensor& x, int64_t columns, int64_t stride) {
  return columns == 1 && stride > 1 && x.is_cpu() &&
      x.scalar_type() == at::kBFloat16;
}

at::Tensor with_zero_columns(const at::Tensor& x, int64_t count) {
  return at::constant_pad_nd(x, std::array<int64_t, 2>{0, count});
}

} // namespace shardtensor::detail
