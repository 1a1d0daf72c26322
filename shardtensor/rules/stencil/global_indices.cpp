#include "shardtensor/rules/stencil/global_indices.h"

#include <algorithm>

#include <ATen/ops/add.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/remainder.h>
#include <ATen/ops/zeros_like.h>

namespace shardtensor {

at::Tensor global_indices(const at::Tensor& indices, const StencilCall& call) {
  if (std::none_of(call.is_cut.begin(), call.is_cut.end(), [](bool cut) {
        return cut;
      })) {
    return indices;
  }
  at::Tensor rest = indices;
  at::Tensor result = at::zeros_like(indices);
  int64_t stride = 1;
  for (size_t i = call.pieces.size(); i-- > 0;) {
    const Interval rows = call.pieces[i].rows;
    const at::Tensor row =
        at::add(at::remainder(rest, rows.extent()), rows.begin);
    rest = at::floor_divide(rest, rows.extent());
    result = at::add(result, row, stride);
    stride *= call.input->size(call.first_dim() + static_cast<int64_t>(i));
  }
  return result;
}

} // namespace shardtensor
