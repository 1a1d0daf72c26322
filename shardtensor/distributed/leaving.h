#pragma once

#include <chrono>
#include <future>
#include <thread>

namespace shardtensor {

/// Around the way out of a job, which lasts no longer than `limit`: then the
/// process says why on stderr and ends with status 1. NCCL's waits for the
/// other ranks, they may wait for this one, and it cannot be called off.
class LeavesInTime {
 public:
  explicit LeavesInTime(std::chrono::milliseconds limit);
  LeavesInTime(const LeavesInTime&) = delete;
  LeavesInTime& operator=(const LeavesInTime&) = delete;
  ~LeavesInTime();

 private:
  std::promise<void> left_;
  std::thread watch_;
};

} // namespace shardtensor
