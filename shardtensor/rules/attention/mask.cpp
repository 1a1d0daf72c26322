#include "shardtensor/rules/attention/mask.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>

namespace shardtensor::detail {
namespace {

using at::Tensor;

/// Next to lower numbers logarithms lose 2^-14 and more in fp32.
constexpr double kLowestSeen = -1024;

} // namespace

HiddenRows hidden_rows(const Tensor& mask, const Tensor& query) {
  if (!mask.defined() || !mask.is_floating_point() || mask.numel() == 0) {
    return {};
  }
  const auto largest =
      mask.amax(-1, /*keepdim=*/true).to(at::toOpMathType(query.scalar_type()));
  const auto rows = largest.lt(kLowestSeen).logical_and_(largest.isfinite());
  const auto queries = rows.squeeze(-1)
                           .flatten(0, 1)
                           .any(0)
                           .expand(query.size(2))
                           .nonzero()
                           .squeeze(-1);
  if (queries.numel() == 0) {
    return {};
  }
  return {largest.masked_fill(rows.logical_not(), 0), queries};
}

Tensor mask_part(const Tensor& mask, int64_t dim, const Interval& part) {
  return !mask.defined() || mask.size(dim) == 1
      ? mask
      : mask.narrow(dim, part.begin, part.extent());
}

Mask Mask::part(int64_t dim, const Interval& own) const {
  return {
      mask_part(added, dim, own),
      {mask_part(hidden.origin, dim, own), hidden.queries}};
}

} // namespace shardtensor::detail
