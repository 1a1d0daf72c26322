#include "shardtensor/rules/index/element_rows.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/arange.h>

#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/rules/index/flat_rows.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {

using at::Tensor;

namespace {

using Dims = std::vector<int64_t>;

bool has(const Dims& dims, int64_t dim) {
  return std::ranges::find(dims, dim) != dims.end();
}

} // namespace

bool is_same_along(const Tensor& index, int64_t dim) {
  return (index.size(dim) == 1 || index.stride(dim) == 0) &&
      !(is_shard_tensor(index) && spec(index)->is_sharded(dim));
}

std::optional<std::vector<int64_t>> dims_of_rows(
    const Tensor& self,
    int64_t dim,
    const Tensor& index) {
  if (self.dim() == 0 || index.dim() != self.dim() || index.numel() == 0 ||
      self.numel() == 0) {
    return {};
  }
  std::vector<int64_t> dims;
  for (int64_t other = 0; other < self.dim(); ++other) {
    if (other != dim && index.size(other) > self.size(other)) {
      return {};
    }
    if (other == dim || !is_same_along(index, other)) {
      dims.push_back(other);
    }
  }
  return dims;
}

Tensor index_of_dims(const Tensor& index, const std::vector<int64_t>& dims) {
  auto result = index;
  for (int64_t dim = index.dim() - 1; dim >= 0; --dim) {
    if (std::ranges::find(dims, dim) == dims.end()) {
      result = result.select(dim, 0);
    }
  }
  return result;
}

Tensor widened(const Tensor& index, int64_t dim, at::IntArrayRef sizes) {
  return viewed_along(index, dim, static_cast<int64_t>(sizes.size()))
      .expand(sizes);
}

std::optional<int64_t> wrapped_dim(
    const Tensor& self,
    int64_t dim,
    const Tensor& index) {
  const auto wrapped = dim < 0 ? dim + self.dim() : dim;
  if (!is_shard_tensor(self) || wrapped < 0 || wrapped >= self.dim() ||
      !is_row_index(index) || is_traced(impl_of(self)->local())) {
    return {};
  }
  return wrapped;
}

std::optional<int64_t> wrapped_cut_dim(
    const Tensor& self,
    int64_t dim,
    const Tensor& index) {
  const auto wrapped = wrapped_dim(self, dim, index);
  return wrapped && spec(self)->is_sharded(*wrapped) ? wrapped : std::nullopt;
}

bool travels_as_it_is(const Tensor& self, int64_t dim, const Tensor& index) {
  if (!is_cut(index) || index.dim() != self.dim()) {
    return false;
  }
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (d != dim &&
        (index.size(d) != self.size(d) || !is_same_along(index, d))) {
      return false;
    }
  }
  return is_cut_beside(index, self, dim);
}

bool is_expanded(const Tensor& self, int64_t dim) {
  return self.size(dim) > 1 && self.stride(dim) == 0 &&
      !spec(self)->is_sharded(dim);
}

bool are_rows(
    const Tensor& self,
    int64_t dim,
    const Tensor& index,
    const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const auto d : dims) {
    count *= index.size(d);
  }
  return dims.size() == 1 || count < index.numel() ||
      index.numel() < self.numel() || is_cut_beside(index, self, dim);
}

Tensor cut_as_batches(
    const Tensor& rows,
    const std::vector<int64_t>& dims,
    const Tensor& x,
    int64_t dim) {
  const auto& own = spec(x);
  if (is_cut(rows)) {
    return rows;
  }
  std::vector<Placement> placements(own->mesh()->axes());
  ShardSpec::Partitions partitions(rows.dim());
  for (size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] == dim || rows.size(i) != x.size(dims[i])) {
      continue;
    }
    for (const auto axis : own->axes(dims[i])) {
      placements[axis] = Placement::shard(static_cast<int64_t>(i));
      partitions[i] = own->partition(dims[i]);
    }
  }
  const auto layout = make_spec(
      own->mesh(), rows.sizes().vec(), placements, std::move(partitions));
  return layout->is_sharded() ? redistribute(promote(rows, own->mesh()), layout)
                              : rows;
}

NamedRows named_rows(
    const Tensor& rows,
    const std::vector<int64_t>& dims,
    int64_t dim,
    int64_t x_dims,
    const std::vector<int64_t>& dropped) {
  NamedRows named;
  Dims before;
  Dims after;
  int64_t runs = 0;
  bool in_run = false;
  for (int64_t d = 0; d < x_dims; ++d) {
    if (has(dropped, d)) {
      continue;
    }
    if (!has(dims, d)) {
      (runs == 0 ? before : after).push_back(d);
      named.indices.push_back(std::nullopt);
      in_run = false;
      continue;
    }
    runs += in_run ? 0 : 1;
    in_run = true;
    if (d == dim) {
      named.indices.push_back(rows);
      continue;
    }
    const auto place = std::ranges::find(dims, d) - dims.begin();
    const auto own = at::arange(
        rows.size(place), at::device(rows.device()).dtype(at::kLong));
    named.indices.push_back(
        viewed_along(own, place, static_cast<int64_t>(dims.size())));
  }
  if (runs > 1) { // then the indices' dims stand in front
    before.insert(before.end(), after.begin(), after.end());
    after = std::exchange(before, {});
  }
  named.order = std::move(before);
  named.order.insert(named.order.end(), dims.begin(), dims.end());
  named.order.insert(named.order.end(), after.begin(), after.end());
  return named;
}

} // namespace shardtensor::detail
