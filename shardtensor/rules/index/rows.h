#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// What reading and writing at index tensors along sharded dims share. Index
// tensors are small beside what they index and are needed by every rank that
// has a part of it; masks are not, and stay cut where they can.

using Indices = c10::List<std::optional<at::Tensor>>;

bool is_mask(const at::Tensor& index);
/// PyTorch's warning of masks in uint8.
void warn_of_bytes(const at::Tensor& index);

/// Integers that PyTorch takes as an index.
bool is_row_index(const at::Tensor& index);

/// One of the tensors of x[...].
struct GivenIndex {
  at::Tensor index;
  int64_t dim; // the first that it names
  int64_t dims; // how many it names: as many as a mask has, else one
};
c10::SmallVector<GivenIndex, 4> given_indices(const Indices& indices);

/// Where the dims of the indices stand in x[...]: in the place of the dims that
/// they name, told in order, where these are side by side, else in front.
int64_t index_position(at::IntArrayRef named);

/// Along some mesh axis.
bool is_cut(const at::Tensor& index);

/// The sizes that indices have together. Raises for those that do not fit.
std::vector<int64_t> shared_sizes(at::TensorList indices);

/// Raises, as one device does, where values do not broadcast to self[indices].
void check_values_fit(at::IntArrayRef values, at::IntArrayRef result);

/// Rows of one dim, as a plain tensor of the common shape of all indices.
struct DimIndex {
  int64_t dim;
  at::Tensor rows; // not negative
};

/// The tensors of x[...], one per indexed dim, with what they do to shapes.
struct Index {
  std::vector<DimIndex> dims;
  std::vector<int64_t> sizes; // of the indices
  int64_t position = 0; // where the indices' dims stand in the result

  std::vector<int64_t> indexed() const {
    std::vector<int64_t> result;
    for (const auto& index : dims) {
      result.push_back(index.dim);
    }
    return result;
  }
  bool has(int64_t dim) const {
    return std::any_of(dims.begin(), dims.end(), [&](const auto& index) {
      return index.dim == dim;
    });
  }
  /// The argument of at::index on a tensor of `ndim` dims.
  Indices list(int64_t ndim) const {
    Indices result;
    for (int64_t dim = 0; dim < ndim; ++dim) {
      result.push_back(std::nullopt);
    }
    for (const auto& index : dims) {
      result.set(index.dim, index.rows);
    }
    return result;
  }
};

/// The integers of x[i, :, j], and the dims that they name.
struct NamedDims {
  std::vector<int64_t> dims;
  std::vector<at::Tensor> indices;

  int64_t position() const {
    return index_position(dims);
  }
  const at::Tensor& index_of(int64_t dim) const {
    return indices[std::ranges::find(dims, dim) - dims.begin()];
  }
};

/// Nothing for masks and for what PyTorch refuses.
std::optional<NamedDims> named_by_rows(
    const at::Tensor& self,
    const Indices& indices);

/// Masks become the indices of their true elements; all are broadcast and not
/// negative. Raises for indices that do not fit. Communication: a sharded index
/// is gathered, a sharded mask too, which is noted as a fallback.
Index read_indices(const at::Tensor& self, const Indices& indices);

/// The layout of self[index]: the dims that are not indexed keep theirs,
/// `on_indexed` stands where an axis cuts an indexed one.
SpecPtr result_spec(
    const SpecPtr& self,
    const Index& index,
    Placement on_indexed = Placement::replicate());

/// `spec` without the dims `dropped` and with those of `inserted`, cut as
/// there, from `position` on. What cuts a dropped dim cuts an inserted one, or
/// none.
SpecPtr with_dims_of(
    const SpecPtr& spec,
    const std::vector<int64_t>& dropped,
    int64_t position,
    const SpecPtr& inserted);

/// One dim, cut as `partition` says along `axes`; whole where there are none.
SpecPtr layout_of_rows(
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes,
    const Partition& partition);
/// The layout of the cut dim `dim` alone.
SpecPtr layout_of_dim(const SpecPtr& spec, int64_t dim);

/// What has one dim, as dim `dim` of `dims`: the others have one element. Not
/// by view(), which could cut another of them where `x` has one, too.
inline at::Tensor viewed_along(const at::Tensor& x, int64_t dim, int64_t dims) {
  auto result = x;
  for (int64_t i = 0; i < dims; ++i) {
    result = i == dim ? result : result.unsqueeze(i);
  }
  return result;
}

/// Indices of int64, negative ones of `extent` rows counted from the front.
at::Tensor nonnegative_rows(const at::Tensor& index, int64_t extent);

/// Which elements of the index this rank has, and the index in local rows.
struct OwnIndex {
  at::Tensor mask; // of the index's sizes
  Index index; // rows of other ranks are 0
};
OwnIndex own_index(const SpecPtr& spec, const Index& index);

/// x[mask] with a mask of no dims is x[None][mask[None]]: the indices of the
/// latter, or nothing when no mask is 0-d. Raises when other indices stand
/// beside it.
std::optional<Indices> without_scalar_mask(const Indices& indices);

/// Where the mask stands, when it is the only index.
std::optional<int64_t> only_mask(const Indices& indices);

/// Where the index stands, when it is the only one and no mask.
std::optional<int64_t> only_rows(const Indices& indices);

/// No masks, and no indexed dim is cut.
bool indexes_whole_dims(const SpecPtr& spec, const Indices& indices);

/// Raises on every rank where an index of such dims is out of bounds and some
/// rank would not see it: the index is cut, or the rank's piece is empty, of
/// self or of `values`, which it may be cut like. See Note [Indices out of
/// bounds].
void check_indices(
    const std::string& op,
    const at::Tensor& self,
    const Indices& indices,
    const at::Tensor& values = {});

} // namespace shardtensor::detail
