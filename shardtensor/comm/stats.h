#pragma once

#include <cstdint>

namespace shardtensor {

// Counted where it happens; read through comm_stats().
void count_exchange(int64_t messages, int64_t bytes);
void count_all_reduce(int64_t bytes);
void count_wait(double seconds);

} // namespace shardtensor
