#pragma once

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

namespace shardtensor::detail {

/// A factor (`alpha`, `beta`) of a product of this dtype: of integers PyTorch
/// takes its whole part.
inline at::Scalar factor_of(const at::Scalar& factor, at::ScalarType dtype) {
  return at::isIntegralType(dtype, /*includeBool=*/true)
      ? at::Scalar(factor.to<int64_t>())
      : factor;
}

} // namespace shardtensor::detail
