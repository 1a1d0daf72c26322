#include "shardtensor/comm/stats.h"

#include <atomic>

namespace shardtensor {

namespace {
// Each counter alone is exact; a reader may see them at slightly different
// times.
struct Counters {
  std::atomic<int64_t> exchanges{0};
  std::atomic<int64_t> all_reduces{0};
  std::atomic<int64_t> messages{0};
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> nanoseconds{0};
  std::atomic<int64_t> plans{0};
};
Counters counters;
} // namespace

void count_exchange(int64_t messages, int64_t bytes) {
  counters.exchanges += messages > 0 ? 1 : 0;
  counters.messages += messages;
  counters.bytes += bytes;
}

void count_all_reduce(int64_t bytes) {
  ++counters.all_reduces;
  counters.bytes += bytes;
}

void count_wait(double seconds) {
  counters.nanoseconds += static_cast<int64_t>(seconds * 1e9);
}

void count_plan() {
  ++counters.plans;
}

CommStats comm_stats() {
  CommStats stats;
  stats.exchanges = counters.exchanges;
  stats.all_reduces = counters.all_reduces;
  stats.messages = counters.messages;
  stats.bytes = counters.bytes;
  stats.seconds = static_cast<double>(counters.nanoseconds) * 1e-9;
  stats.plans = counters.plans;
  return stats;
}

void reset_comm_stats() {
  counters.exchanges = 0;
  counters.all_reduces = 0;
  counters.messages = 0;
  counters.bytes = 0;
  counters.nanoseconds = 0;
  counters.plans = 0;
}

} // namespace shardtensor
