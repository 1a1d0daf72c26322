#pragma once

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

// Memory of the guarded device: pages that the host cannot touch, but within a
// kernel. A read that would be one of device memory ends the process where it
// is. New memory is full of poison.

namespace guarded {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;

/// What a device would wait for, since the last reset, in this process.
struct Counts {
  std::atomic<int64_t> to_host{0}; // copies and numbers that the host waits for
  std::atomic<int64_t> to_device{0}; // copies from pageable host memory
  std::atomic<int64_t> largest_to_device{0}; // elements of one such copy
  std::atomic<int64_t> kernels{0};
  std::atomic<int64_t> recorded_streams{0}; // record_stream
  std::atomic<int64_t> event_waits{0};
};
Counts& counts();

c10::Allocator* allocator();

inline bool is_guarded(const at::Tensor& x) {
  return x.defined() && x.device().type() == kDevice;
}

/// While it lives the host may touch the tensors that it was asked for.
class Kernel {
 public:
  Kernel();
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  /// A CPU tensor in the memory of `x`; `x` itself where it is one. Tensors
  /// that share a storage share the result's.
  at::Tensor on_host(const at::Tensor& x);

  /// A guarded tensor for what a CPU kernel made: a view of one of the
  /// tensors above, or a copy.
  at::Tensor on_device(const at::Tensor& made);

 private:
  struct Opened {
    c10::Storage device;
    c10::Storage host;
  };
  const c10::Storage& open(
      const c10::Storage& storage,
      c10::DispatchKeySet keys);

  std::unordered_map<const void*, Opened> by_device_; // by StorageImpl
  struct Known {
    c10::Storage device;
    c10::DispatchKeySet keys; // views take them over, those of inference, too
  };
  std::unordered_map<const void*, Known> by_host_;
};

} // namespace guarded
