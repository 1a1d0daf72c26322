#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>
#include <cstring>
#include <mutex>
#include <utility>

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

namespace guarded {
namespace {

struct Block {
  void* base = nullptr;
  size_t bytes = 0;
  int64_t users = 0;
  bool is_new = true; // holds what its last tensor left
};

/// Those that no tensor has; nobody may touch them.
using FreeBlocks = std::unordered_map<size_t, std::vector<Block*>>;
FreeBlocks& free_blocks() {
  static auto* blocks = new FreeBlocks();
  return *blocks;
}

std::mutex& blocks_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

void protect(const Block& block, int access) {
  TORCH_CHECK(
      mprotect(block.base, block.bytes, access) == 0, "guarded: mprotect");
}

void use(Block& block, int64_t by) {
  const std::lock_guard lock(blocks_mutex());
  const bool was = block.users > 0;
  block.users += by;
  if (was != (block.users > 0)) {
    protect(block, was ? PROT_NONE : PROT_READ | PROT_WRITE);
  }
  if (by > 0 && std::exchange(block.is_new, false)) {
    std::memset(block.base, 0xCD, block.bytes);
  }
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  const std::lock_guard lock(blocks_mutex());
  block->is_new = true;
  free_blocks()[block->bytes].push_back(block);
}

Block* make_block(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  const std::lock_guard lock(blocks_mutex());
  auto& same_size = free_blocks()[bytes];
  if (!same_size.empty()) {
    auto* block = same_size.back();
    same_size.pop_back();
    return block;
  }
  auto* block = new Block();
  block->bytes = bytes;
  block->base =
      mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(block->base != MAP_FAILED, "guarded: out of memory");
  return block;
}

Block* block_of(const c10::Storage& storage) {
  return static_cast<Block*>(storage.data_ptr().get_context());
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, 0);
    if (bytes == 0) {
      return {nullptr, nullptr, &release_nothing, device};
    }
    auto* block = make_block(bytes);
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

at::Tensor make_tensor(
    c10::Storage storage,
    c10::DispatchKeySet keys,
    const at::Tensor& like) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->set_storage_offset(like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return result;
}

/// As a constructor of tensors adds them.
c10::DispatchKeySet new_keys(c10::DispatchKey key) {
  const c10::DispatchKeySet keys(key);
  return c10::InferenceMode::is_enabled() ? keys
                                          : keys |
          c10::getAutogradRelatedKeySetFromBackend(
                                                c10::toBackendComponent(key)) |
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
}

} // namespace

Counts& counts() {
  static Counts instance;
  return instance;
}

c10::Allocator* allocator() {
  static auto* instance = new Allocator();
  return instance;
}

Kernel::Kernel() {
  ++counts().kernels;
}

Kernel::~Kernel() {
  for (const auto& [key, opened] : by_device_) {
    if (auto* block = block_of(opened.device)) {
      use(*block, -1);
    }
  }
}

const c10::Storage& Kernel::open(
    const c10::Storage& storage,
    c10::DispatchKeySet keys) {
  const auto found = by_device_.find(storage.unsafeGetStorageImpl());
  if (found != by_device_.end()) {
    return found->second.host;
  }
  if (auto* block = block_of(storage)) {
    use(*block, +1);
  }
  const c10::Storage host(
      c10::Storage::use_byte_size_t{},
      storage.nbytes(),
      c10::DataPtr(
          const_cast<void*>(storage.data_ptr().get()), c10::Device(c10::kCPU)),
      nullptr,
      false);
  by_host_.emplace(host.unsafeGetStorageImpl(), Known{storage, keys});
  return by_device_
      .emplace(storage.unsafeGetStorageImpl(), Opened{storage, host})
      .first->second.host;
}

at::Tensor Kernel::on_host(const at::Tensor& x) {
  return is_guarded(x)
      ? make_tensor(
            open(x.storage(), x.key_set()), new_keys(c10::DispatchKey::CPU), x)
      : x;
}

at::Tensor Kernel::on_device(const at::Tensor& made) {
  const auto known = by_host_.find(made.storage().unsafeGetStorageImpl());
  if (known != by_host_.end()) {
    return make_tensor(known->second.device, known->second.keys, made);
  }
  const bool is_zero = made._is_zerotensor(); // of forward mode: no memory
  const auto bytes = is_zero ? 0 : made.storage().nbytes();
  const c10::Storage storage(
      c10::Storage::use_byte_size_t{},
      bytes,
      allocator()->allocate(bytes),
      allocator(),
      true);
  const auto& host = open(storage, {});
  if (bytes > 0) {
    std::memcpy(host.mutable_data(), made.storage().data(), bytes);
  }
  auto keys = new_keys(kKey);
  if (is_zero) {
    keys = keys.add(c10::DispatchKey::ZeroTensor);
  }
  return make_tensor(storage, keys, made);
}

} // namespace guarded
