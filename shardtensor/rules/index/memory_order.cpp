#include "shardtensor/rules/index/memory_order.h"

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

} // namespace

Dims indexed_strides(
    const at::Tensor& self,
    const Indices& given,
    const Dims& sizes) {
  const auto named = named_dims(given);
  if (self.is_contiguous() || named.empty()) {
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
  Dims of_indices(sizes.size(), 0);
  int64_t stride = 1;
  for (int64_t dim = place + added - 1; dim >= place; --dim) {
    of_indices[dim] = stride;
    stride *= sizes[dim];
  }
  return dense_strides(memory_order({of_self, of_indices}, sizes), sizes);
}

} // namespace shardtensor::detail
