#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "queue.h"

namespace guarded {
namespace {

/// Those that no tensor has; nobody may touch them.
using FreeBlocks =
    std::map<std::pair<c10::StreamId, size_t>, std::vector<Block*>>;
FreeBlocks& free_blocks() {
  static auto* blocks = new FreeBlocks();
  return *blocks;
}

/// Those freed since their stream made a tensor.
std::vector<Block*>& just_freed(c10::StreamId stream) {
  static auto* blocks =
      new std::unordered_map<c10::StreamId, std::vector<Block*>>();
  return (*blocks)[stream];
}

void protect(const Block& block, int access) {
  TORCH_CHECK(
      mprotect(block.base, block.bytes, access) == 0, "guarded: mprotect");
}

void poison(const Block& block) {
  std::memset(block.base, 0xCD, block.bytes);
}

bool may_be_used_again(const Block& block) {
  return std::all_of(
      block.readers.begin(), block.readers.end(), [](const auto& reader) {
        return has_run(reader.first, reader.second);
      });
}

/// See Note [Memory of a stream].
void release(void* context) {
  auto* block = static_cast<Block*>(context);
  const std::lock_guard lock(device_mutex());
  counts().bytes -= static_cast<int64_t>(block->bytes);
  for (const auto stream : block->recorded) {
    block->readers.emplace_back(stream, launched(stream));
  }
  block->recorded.clear();
  just_freed(block->stream).push_back(block);
  free_blocks()[{block->stream, block->bytes}].push_back(block);
}

/// By their first address; they are never given back.
std::map<const char*, Block*>& all_blocks() {
  static auto* blocks = new std::map<const char*, Block*>();
  return *blocks;
}

Block* new_block(size_t bytes) {
  auto* block = new Block();
  block->bytes = bytes;
  block->stream = current_stream();
  block->base =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(block->base != MAP_FAILED, "guarded: out of memory");
  all_blocks()[static_cast<const char*>(block->base)] = block;
  return block;
}

Block* take_block(size_t bytes) {
  static uint64_t owners = 0;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  const std::lock_guard lock(device_mutex());
  for (const auto* freed : std::exchange(just_freed(current_stream()), {})) {
    spoil_late_readers(*freed);
  }
  auto& blocks = free_blocks()[{current_stream(), bytes}];
  const auto found = std::find_if(blocks.rbegin(), blocks.rend(), [](Block* b) {
    return may_be_used_again(*b);
  });
  Block* block = nullptr;
  if (found == blocks.rend()) {
    block = new_block(bytes);
  } else {
    block = *found;
    blocks.erase(std::next(found).base());
  }
  block->owner = ++owners;
  counts().bytes += static_cast<int64_t>(bytes);
  counts().peak_bytes = std::max<int64_t>(counts().peak_bytes, counts().bytes);
  block->readers.clear();
  return block;
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, 0);
    if (bytes == 0) {
      return {nullptr, nullptr, &release_nothing, device};
    }
    auto* block = take_block(bytes);
    return {block->base, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "guarded: copy_data");
  }

 private:
  static void release_nothing(void*) {}
};

} // namespace

Counts& counts() {
  static Counts instance;
  return instance;
}

c10::Allocator* allocator() {
  static auto* instance = new Allocator();
  return instance;
}

namespace {

at::Tensor bytes_of(const c10::Storage& storage, size_t bytes) {
  const auto options = at::TensorOptions(kDevice).dtype(at::kByte);
  return at::empty({0}, options)
      .set_(storage, 0, {static_cast<int64_t>(bytes)}, {1});
}

} // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const at::AutoDispatchBelowAutograd no_autograd;
  auto* impl = storage.unsafeGetStorageImpl();
  const size_t kept = std::min(impl->nbytes(), bytes);
  const c10::Storage before(
      c10::Storage::use_byte_size_t{},
      impl->nbytes(),
      impl->set_data_ptr(allocator()->allocate(bytes)),
      nullptr,
      false);
  impl->set_nbytes(bytes);
  if (kept > 0) {
    bytes_of(storage, kept).copy_(bytes_of(before, kept));
  }
}

Block* block_of(const c10::DataPtr& memory) {
  const auto* address = static_cast<const char*>(memory.get());
  const std::lock_guard lock(device_mutex());
  const auto behind = all_blocks().upper_bound(address);
  if (!address || behind == all_blocks().begin()) {
    return nullptr;
  }
  auto* block = std::prev(behind)->second;
  const auto* base = static_cast<const char*>(block->base);
  return address < base + block->bytes ? block : nullptr;
}

void record(const c10::DataPtr& memory, c10::StreamId stream) {
  if (auto* block = block_of(memory)) {
    ++counts().recorded_streams;
    const std::lock_guard lock(device_mutex());
    block->recorded.push_back(stream);
  }
}

Open::Open(const std::vector<Use>& uses) {
  for (const auto& use : uses) {
    auto& block = *use.block;
    if (block.open++ == 0) {
      protect(block, PROT_READ | PROT_WRITE);
    }
    blocks_.push_back(&block);
    if (use.owner > block.content || use.freed_too_early) {
      poison(block); // what earlier kernels left
      block.content = std::max(block.content, use.owner);
    }
  }
}

Open::~Open() {
  for (auto* block : blocks_) {
    if (--block->open == 0) {
      protect(*block, PROT_NONE);
    }
  }
}

} // namespace guarded
