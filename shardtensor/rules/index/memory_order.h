#pragma once

#include <cstdint>
#include <vector>

#include "shardtensor/rules/index/rows.h"

namespace shardtensor::detail {

/// The strides of self[given], of `sizes`, as one device's TensorIterator has
/// them (ATen/native/TensorAdvancedIndexing.cpp); none: contiguous.
std::vector<int64_t> indexed_strides(
    const at::Tensor& self,
    const Indices& given,
    const std::vector<int64_t>& sizes);

} // namespace shardtensor::detail
