#include "shardtensor/rules/stencil/global_indices.h"

#include <algorithm>

#include <ATen/TensorOperators.h>

#include "shardtensor/layout/global_rows.h"

namespace shardtensor::detail {

at::Tensor global_indices(const at::Tensor& indices, const StencilCall& call) {
  if (std::none_of(call.is_cut.begin(), call.is_cut.end(), [](bool cut) {
        return cut;
      })) {
    return indices;
  }
  std::vector<int64_t> gathered;
  for (const StencilPiece& piece : call.pieces) {
    gathered.push_back(piece.rows.extent());
  }
  const auto& sizes = call.input->sizes();
  return flat_indices(
      indices,
      gathered,
      {sizes.begin() + call.first_dim(), sizes.end()},
      [&](int64_t dim, const at::Tensor& rows) {
        return rows + call.pieces[dim].rows.begin;
      });
}

} // namespace shardtensor::detail
