#include "shardtensor/rules/index/memory_order.h"

#include "shardtensor/dispatch/nominal_strides.h"

namespace shardtensor::detail {
namespace {

using Dims = std::vector<int64_t>;

/// The dims of self that the indices name; a mask names as many as it has.
Dims named_dims(const Indices& given) {
  Dims named;
  int64_t dim = 0;
  for (const std::optional<at::Tensor> index : given) {
    const bool names = index && index->defined();
    const auto count = names && is_mask(*index) ? index->dim() : 1;
    for (int64_t i = 0; i < count; ++i, ++dim) {
      if (names) {
        named.push_back(dim);
      }
    }
  }
  return named;
}

/// Where the dims of the indices stand in the result.
int64_t place_of(const Dims& named) {
  const auto adjacent =
      named.back() - named.front() + 1 == static_cast<int64_t>(named.size());
  return adjacent ? named.front() : 0;
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
  const auto place = place_of(named);
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
