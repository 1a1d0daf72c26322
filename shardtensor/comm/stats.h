#pragma once

#include <cstdint>

namespace shardtensor {

/// Since the start or the last reset, on this rank.
struct CommStats {
  int64_t exchanges = 0; // calls with at least one message
  int64_t all_reduces = 0;
  int64_t messages = 0; // point-to-point pieces sent to other ranks
  int64_t bytes = 0; // sent to others; an all-reduce counts its tensor once
  double seconds = 0; // spent waiting
  int64_t plans = 0; // of rows that an index names; kept with that index
};
CommStats comm_stats();
void reset_comm_stats();

// Counted where it happens.
void count_exchange(int64_t messages, int64_t bytes);
void count_all_reduce(int64_t bytes);
void count_wait(double seconds);
void count_plan();

} // namespace shardtensor
