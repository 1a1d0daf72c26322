#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// Ascending keys, one less than ranks, that part all ranks' keys into like
/// numbers for each rank: they are keys at even steps of all ranks' samples,
/// the same on every rank; none where no rank has a key. `ascending`: the own
/// keys, integers. Communication: all-gathers of a number and of up to 64 keys.
at::Tensor bounds_between_ranks(
    const at::Tensor& ascending,
    const std::string& group);

} // namespace shardtensor::detail
