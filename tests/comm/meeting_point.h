#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/where.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace shardtensor::testing {

/// Where the ranks of one group meet: each shows a value to the others and sees
/// theirs, or leaves a message for one of them.
class MeetingPoint {
 public:
  MeetingPoint(int64_t ranks, std::shared_ptr<std::atomic<bool>> failed)
      : shown_(ranks), failed_(std::move(failed)) {}

  /// True once some rank of the mesh has raised.
  bool failed() const {
    return *failed_;
  }

  /// Calls use(what each rank shows) once all are here; returns once all have
  /// used it.
  template <typename T, typename Use>
  void meet(int64_t rank, const T& value, Use use) {
    shown_[rank] = &value;
    wait_for_all();
    std::vector<const T*> all;
    for (const void* shown : shown_) {
      all.push_back(static_cast<const T*>(shown));
    }
    std::exception_ptr error;
    try {
      use(all);
    } catch (...) {
      error = std::current_exception();
    }
    wait_for_all(); // others may still read this rank's value
    if (error) {
      std::rethrow_exception(error);
    }
  }

  void leave_message(int64_t from, int64_t to, at::Tensor message) {
    const std::lock_guard lock(mutex_);
    messages_[{from, to}].push_back(std::move(message));
    changed_.notify_all();
  }
  at::Tensor take_message(int64_t from, int64_t to) {
    std::unique_lock lock(mutex_);
    auto& left = messages_[{from, to}];
    wait_until(lock, [&] { return !left.empty(); });
    at::Tensor message = left.front();
    left.pop_front();
    return message;
  }

 private:
  void wait_for_all() {
    std::unique_lock lock(mutex_);
    const int64_t round = round_;
    if (++arrived_ == static_cast<int64_t>(shown_.size())) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    wait_until(lock, [&] { return round_ != round; });
  }

  template <typename Done>
  void wait_until(std::unique_lock<std::mutex>& lock, Done done) {
    for (int tries = 0; !done(); ++tries) {
      TORCH_CHECK(!failed(), "another rank failed");
      TORCH_CHECK(tries < 2000, "another rank did not come");
      changed_.wait_for(lock, std::chrono::milliseconds(10));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t arrived_ = 0;
  int64_t round_ = 0;
  std::vector<const void*> shown_;
  std::map<std::pair<int64_t, int64_t>, std::deque<at::Tensor>> messages_;
  std::shared_ptr<std::atomic<bool>> failed_;
};
using MeetingPointPtr = std::shared_ptr<MeetingPoint>;

inline at::Tensor combine(
    const at::Tensor& a,
    const at::Tensor& b,
    const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return a + b;
    case c10d::ReduceOp::PRODUCT:
      return a * b;
    case c10d::ReduceOp::MAX:
      return at::where(a < b, b, a); // as gloo does: loses some NaNs
    case c10d::ReduceOp::MIN:
      return at::where(b < a, b, a);
    default:
      TORCH_CHECK(false, "no such reduction between threads");
  }
}

/// The reduction of what all ranks show, in rank order.
inline at::Tensor reduce_shown(
    const std::vector<const at::Tensor*>& all,
    const c10d::ReduceOp& op) {
  at::Tensor result = all[0]->clone();
  for (size_t i = 1; i < all.size(); ++i) {
    result = combine(result, *all[i], op);
  }
  return result;
}

struct Splitted {
  at::Tensor tensor;
  std::vector<int64_t> splits;

  at::Tensor part(int64_t rank) const {
    const auto begin =
        std::accumulate(splits.begin(), splits.begin() + rank, int64_t{0});
    return tensor.narrow(0, begin, splits[rank]);
  }
};

/// Rank `rank`'s part of what each rank shows goes to where it belongs.
inline void take_parts(
    const Splitted& received,
    const std::vector<const Splitted*>& sent,
    int64_t rank) {
  for (size_t peer = 0; peer < sent.size(); ++peer) {
    received.part(static_cast<int64_t>(peer)).copy_(sent[peer]->part(rank));
  }
}

} // namespace shardtensor::testing
