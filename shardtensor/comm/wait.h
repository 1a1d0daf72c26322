#pragma once

#include <chrono>

namespace shardtensor {

/// Bounds every wait, in seconds; 0 (the default) leaves the process group's
/// own time limit.
void set_communication_timeout(double seconds);

/// `before` is called before every wait for other ranks and `after` with its
/// result afterwards: Python gives up its lock meanwhile. Threads of the
/// process group need it to drop tensors, and callers such as x[3] hold it.
using BeforeWait = void* (*)();
using AfterWait = void (*)(void*);
void set_wait_hooks(BeforeWait before, AfterWait after);

// What waits for other ranks uses these two.

/// 0: no limit of our own.
std::chrono::milliseconds communication_timeout();

/// Calls the hooks: before, when it is made, and after.
class WaitHooks {
 public:
  WaitHooks();
  ~WaitHooks();
  WaitHooks(const WaitHooks&) = delete;
  WaitHooks& operator=(const WaitHooks&) = delete;

 private:
  void* state_ = nullptr;
};

} // namespace shardtensor
