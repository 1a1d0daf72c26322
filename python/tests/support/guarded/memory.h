#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

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
  std::atomic<int64_t> bytes{0}; // of tensors
  std::atomic<int64_t> peak_bytes{0};
};
Counts& counts();

inline bool is_guarded(const at::Tensor& x) {
  return x.defined() && x.device().type() == kDevice;
}

// Note [Memory of a stream]
// As of CUDA's allocator: a block belongs to the stream that was current when
// it was made. Freed by the host, it is that of the stream's next tensor, for
// its kernels run one after the other. Kernels of another stream that have not
// run by then are in time if the stream waits for them before it makes a tensor
// (FSDP's gradients count on that), or if record_stream told the allocator;
// else they find poison.

/// Pages, of one tensor's memory after another's.
struct Block {
  void* base = nullptr;
  size_t bytes = 0;
  c10::StreamId stream = 0;
  int64_t open = 0; // by kernels that run
  uint64_t owner = 0; // number of the tensor's memory that has it
  uint64_t content = 0; // whose numbers it holds
  std::vector<c10::StreamId> recorded; // for the owner
  std::vector<std::pair<c10::StreamId, uint64_t>> readers; // of the last owner
};

/// The memory of one tensor as a kernel will find it.
struct Use {
  Block* block;
  uint64_t owner;
  bool freed_too_early = false;
};

c10::Allocator* allocator();

/// What it held and has place for stays.
void resize_storage(const c10::Storage& storage, size_t bytes);

/// By the address, which is all that from_blob's tensors know of theirs.
/// Nothing where the tensor has no memory.
Block* block_of(const c10::DataPtr& memory);

/// The stream reads it, too: see Note [Memory of a stream].
void record(const c10::DataPtr& memory, c10::StreamId stream);

/// While it lives the host may touch these blocks.
class Open {
 public:
  explicit Open(const std::vector<Use>& uses);
  ~Open();
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;

 private:
  std::vector<Block*> blocks_;
};

} // namespace guarded
