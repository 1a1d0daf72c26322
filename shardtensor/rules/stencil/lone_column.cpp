#include "shardtensor/rules/stencil/lone_column.h"

#include <array>

#include <ATen/ops/constant_pad_nd.h>

namespace shardtensor::detail {

at::Tensor with_zero_columns(const at::Tensor& x, int64_t count) {
  return at::constant_pad_nd(x, std::array<int64_t, 2>{0, count});
}

at::Tensor convolve_columns(
    const at::Tensor& x,
    const Window& last,
    bool transposed,
    c10::function_ref<at::Tensor(const at::Tensor&)> convolve) {
  const int64_t stride = last.stride;
  if (transposed) {
    if (!is_lone_column(x, x.size(-1), stride)) {
      return convolve(x);
    }
    const auto both = convolve(with_zero_columns(x, 1));
    return both.narrow(-1, 0, both.size(-1) - stride);
  }
  const int64_t read = x.size(-1) + 2 * last.padding - last.span();
  if (read < 0 || !is_lone_column(x, read / stride + 1, stride)) {
    return convolve(x);
  }
  return convolve(with_zero_columns(x, stride)).narrow(-1, 0, 1);
}

} // namespace shardtensor::detail
