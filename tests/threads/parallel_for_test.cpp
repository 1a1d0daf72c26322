#include "shardtensor/threads/parallel_for.h"

#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace shardtensor::detail {
namespace {

class ParallelFor : public ::testing::Test {
 protected:
  ParallelFor() {
    at::set_num_threads(3);
  }
  ~ParallelFor() override {
    at::set_num_threads(before_);
  }

 private:
  int before_ = at::get_num_threads();
};

TEST_F(ParallelFor, VisitsEveryIndexOnce) {
  for (const int64_t count : {0, 1, 2, 7, 8, 9, 1000}) {
    for (const int64_t grain : {1, 2, 8, 999, 5000}) {
      std::vector<int> visits(count);
      parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        EXPECT_EQ(begin % grain, 0);
        for (int64_t i = begin; i < end; ++i) {
          ++visits[i];
        }
      });
      EXPECT_EQ(visits, std::vector<int>(count, 1)) << count << ", " << grain;
    }
  }
}

TEST_F(ParallelFor, ThreadsShareTheRanges) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  const auto visit = [&](int64_t, int64_t) {
    const std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
  };
  parallel_for(30, 1, visit);
  EXPECT_EQ(threads.size(), 3U);

  threads.clear();
  parallel_for(30, 30, visit); // no longer than its grain
  EXPECT_EQ(threads.size(), 1U);

  threads.clear();
  at::set_num_threads(1);
  parallel_for(30, 1, visit);
  EXPECT_EQ(threads.size(), 1U);
}

TEST_F(ParallelFor, ALoopInALoopStaysInItsThread) {
  parallel_for(3, 1, [&](int64_t, int64_t) {
    const auto thread = std::this_thread::get_id();
    parallel_for(9, 1, [&](int64_t, int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), thread);
    });
  });
}

TEST_F(ParallelFor, WhatABodyThrowsIsThrown) {
  const auto fail = [](int64_t begin, int64_t) {
    if (begin > 0) {
      throw std::runtime_error("no");
    }
  };
  EXPECT_THROW(parallel_for(30, 1, fail), std::runtime_error);
}

} // namespace
} // namespace shardtensor::detail
