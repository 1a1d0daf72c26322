#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/rules/index/rows.h"

namespace shardtensor::detail {

// Note [Rows of elements]
// gather and scatter name elements by an index of as many dims as there are.
// Along most of them the index is the same, points' numbers expanded over
// channels: along these the elements are rows. Along the others, batches say, a
// row is named by its own place: x.gather(1, index) is
// x[arange(batches), index]. Dims that x is expanded along itself name nothing.
// So such calls become x[i, j] or x[i, j] = values, above autograd (Note [Flat
// rows]). An index that all ranks have and that differs along all dims names
// single elements: where they are as many as x's, x is cut by another dim.

/// The index has one element along the dim, or one expanded, on all ranks.
bool is_same_along(const at::Tensor& index, int64_t dim);

/// The dims along which `index` differs, and `dim`, in order. None where
/// PyTorch refuses such an index, or there are no elements.
std::optional<std::vector<int64_t>> dims_of_rows(
    const at::Tensor& self,
    int64_t dim,
    const at::Tensor& index);

/// The index of these dims alone.
at::Tensor index_of_dims(
    const at::Tensor& index,
    const std::vector<int64_t>& dims);

/// The index of dim `dim` alone, expanded to these sizes.
at::Tensor widened(const at::Tensor& index, int64_t dim, at::IntArrayRef sizes);

/// The dim, counted from the front, of a ShardTensor that rules may move; none
/// for one that it hasn't, or another index than of integers.
std::optional<int64_t> wrapped_dim(
    const at::Tensor& self,
    int64_t dim,
    const at::Tensor& index);
/// The same of a dim that is cut.
std::optional<int64_t> wrapped_cut_dim(
    const at::Tensor& self,
    int64_t dim,
    const at::Tensor& index);

/// An index of rows alone, cut as they are: the dispatch level sends them.
bool travels_as_it_is(
    const at::Tensor& self,
    int64_t dim,
    const at::Tensor& index);

/// The dim shows one row, over and over.
bool is_expanded(const at::Tensor& self, int64_t dim);

/// See the end of Note [Rows of elements].
bool are_rows(
    const at::Tensor& self,
    int64_t dim,
    const at::Tensor& index,
    const std::vector<int64_t>& dims);

/// A whole index of rows cut as x cuts the other dims that it differs along.
at::Tensor cut_as_batches(
    const at::Tensor& rows,
    const std::vector<int64_t>& dims,
    const at::Tensor& x,
    int64_t dim);

/// x[indices], and which dims of the call its dims are.
struct NamedRows {
  Indices indices;
  std::vector<int64_t> order;
};

/// Each of `dims` is named by its own place, but `dim`, by the rows; x is
/// without the dims `dropped`.
NamedRows named_rows(
    const at::Tensor& rows,
    const std::vector<int64_t>& dims,
    int64_t dim,
    int64_t x_dims,
    const std::vector<int64_t>& dropped = {});

} // namespace shardtensor::detail
