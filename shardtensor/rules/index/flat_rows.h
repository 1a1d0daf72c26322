#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/mesh.h"
#include "shardtensor/rules/index/rows.h"

namespace shardtensor::detail {

// Note [Flat rows]
// Rows travel by one index of one dim (Note [Rows by a cut index]), and a mask
// chooses among the own rows of one. x[i, j] names row i * n + j of x with both
// dims as one, a mask of several dims rows of those. So such calls become calls
// along one dim; those that read do above autograd: backward meets the same
// index, whose plan is kept, and the same mask.

/// `count` dims from `first` on as one.
at::Tensor flattened(const at::Tensor& x, int64_t first, int64_t count);

/// Cut along `dim` by these axes, its rows in order.
at::Tensor cut_along(
    const at::Tensor& x,
    int64_t dim,
    const std::vector<int64_t>& axes);

/// The index cut along all of these axes: where it is not, in its longest dim.
at::Tensor cut_index(
    const at::Tensor& given,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes);

/// Whether it is a ShardTensor, cut along all axes that cut dim `dim` of self.
bool is_cut_beside(
    const at::Tensor& index,
    const at::Tensor& self,
    int64_t dim);

} // namespace shardtensor::detail
