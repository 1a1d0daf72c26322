#include "shardtensor/comm/wait.h"

#include <atomic>
#include <cmath>

#include <c10/util/Exception.h>

namespace shardtensor {

namespace {
constexpr double kLargestTimeout = 1e9; // c10d counts nanoseconds in 64 bits
std::atomic<int64_t> timeout_milliseconds{0};
std::atomic<BeforeWait> before_wait{nullptr};
std::atomic<AfterWait> after_wait{nullptr};
} // namespace

void set_communication_timeout(double seconds) {
  TORCH_CHECK_VALUE(
      seconds >= 0 && seconds <= kLargestTimeout,
      "set_communication_timeout: seconds is ",
      seconds,
      ", expected 0 (no limit) to 1e9");
  timeout_milliseconds = static_cast<int64_t>(std::ceil(seconds * 1e3));
}

std::chrono::milliseconds communication_timeout() {
  return std::chrono::milliseconds(timeout_milliseconds.load());
}

void set_wait_hooks(BeforeWait before, AfterWait after) {
  before_wait = before;
  after_wait = after;
}

WaitHooks::WaitHooks() {
  if (const auto before = before_wait.load()) {
    state_ = before();
  }
}

WaitHooks::~WaitHooks() {
  if (const auto after = after_wait.load()) {
    after(state_);
  }
}

} // namespace shardtensor
