#pragma once

#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace shardtensor::detail {

/// Calls body(begin, end) for ranges that together are [0, count), side by side
/// on as many of PyTorch's threads as `torch.set_num_threads` allows. Ranges
/// begin at multiples of `grain`; one thread does what is no longer than that.
/// What a body throws is thrown here.
///
/// Not at::parallel_for: it is a template, and a plain loop in files that are
/// not compiled with the OpenMP that PyTorch was built with.
void parallel_for(
    int64_t count,
    int64_t grain,
    c10::function_ref<void(int64_t begin, int64_t end)> body);

} // namespace shardtensor::detail
