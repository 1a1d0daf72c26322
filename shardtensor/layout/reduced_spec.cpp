#include "shardtensor/layout/reduced_spec.h"

#include <algorithm>
#include <numeric>
#include <set>

#include <c10/util/Exception.h>

namespace shardtensor::detail {

std::vector<int64_t> reduced_dims(
    const char* op,
    int64_t ndim,
    at::OptionalIntArrayRef dims) {
  std::vector<int64_t> result;
  if (!dims || dims->empty()) {
    result.resize(ndim);
    std::iota(result.begin(), result.end(), 0);
    return result;
  }
  const auto bound = std::max<int64_t>(ndim, 1);
  for (const int64_t dim : *dims) {
    TORCH_CHECK_INDEX(
        dim >= -bound && dim < bound,
        op,
        ": expected dims in [",
        -bound,
        ", ",
        bound - 1,
        "], got ",
        dim);
    result.push_back(dim < 0 ? dim + bound : dim);
  }
  std::sort(result.begin(), result.end());
  TORCH_CHECK(
      std::adjacent_find(result.begin(), result.end()) == result.end(),
      op,
      ": a dim appears twice in ",
      *dims);
  if (ndim == 0) {
    result.clear(); // its dim 0 is none
  }
  return result;
}

std::vector<int64_t> axes_of_dims(
    const ShardSpec& spec,
    const std::vector<int64_t>& dims) {
  std::set<int64_t> axes;
  for (const int64_t dim : dims) {
    const auto of_dim = spec.axes(dim);
    axes.insert(of_dim.begin(), of_dim.end());
  }
  return {axes.begin(), axes.end()};
}

SpecPtr reduced_spec(
    const SpecPtr& spec,
    const std::vector<int64_t>& dims,
    bool keepdim,
    Placement on_reduced_axes) {
  std::vector<int64_t> sizes;
  std::vector<int64_t> from;
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    const bool reduced = std::binary_search(dims.begin(), dims.end(), dim);
    if (!reduced || keepdim) {
      sizes.push_back(reduced ? 1 : spec->size(dim));
      from.push_back(reduced ? -1 : dim);
    }
  }
  return with_dims(spec, std::move(sizes), from, on_reduced_axes);
}

} // namespace shardtensor::detail
