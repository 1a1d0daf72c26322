#include "shardtensor/rules/index/memory_order.h"

#include <algorithm>

#include "shardtensor/dispatch/nominal_strides.h"

namespace shardtensor::detail {
namespace {

using Dims = std::vector<int64_t>;

/// The dims of self that the indices name; a mask names as many as it has.
Dims named_dims(const Indices& given) {
  Dims named;
  for (const auto& [index, first, count] : given_indices(given)) {
    for (auto dim = first; dim < first + count; ++dim) {
      named.push_back(dim);
    }
  }
  return named;
}

/// Of an index whose last dim is the result's dim `last`, 0 where it is
/// broadcast; a mask stands for its rows.
Dims strides_of_index(
    const at::Tensor& index,
    int64_t last,
    const Dims& sizes) {
  Dims strides(sizes.size(), 0);
  if (is_mask(index)) {
    strides[last] = 1;
    return strides;
  }
  for (int64_t dim = 0; dim < index.dim(); ++dim) {
    const auto place = last - index.dim() + 1 + dim;
    strides[place] = index.size(dim) == sizes[place] ? index.stride(dim) : 0;
  }
  return strides;
}

} // namespace

Dims indexed_strides(
    const at::Tensor& self,
    const Indices& given,
    const Dims& sizes) {
  const auto named = named_dims(given);
  const auto indices = given_indices(given);
  const bool are_contiguous = std::ranges::all_of(
      indices, [](const auto& one) { return one.index.is_contiguous(); });
  if ((self.is_contiguous() && are_contiguous) || named.empty()) {
    return {};
  }
  const auto kept = self.dim() - static_cast<int64_t>(named.size());
  const auto added = static_cast<int64_t>(sizes.size()) - kept;
  const auto place = index_position(named);
  // What the iterator goes over: self, which stands still along the dims of the
  // indices, and the indices, which do so along the others.
  Dims of_self;
  auto next = named.begin();
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (next != named.end() && *next == dim) {
      ++next;
    } else {
      of_self.push_back(self.stride(dim));
    }
  }
  of_self.insert(of_self.begin() + place, added, 0);
  std::vector<Dims> strides{of_self};
  for (const auto& one : indices) {
    strides.push_back(strides_of_index(one.index, place + added - 1, sizes));
  }
  return dense_strides(memory_order(strides, sizes), sizes);
}

} // namespace shardtensor::detail
