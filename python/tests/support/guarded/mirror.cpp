#include "mirror.h"

#include <cstdlib>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

namespace guarded {
namespace {

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
  const auto backend = c10::toBackendComponent(key);
  const auto keys = c10::DispatchKeySet(key) |
      c10::getAutocastRelatedKeySetFromBackend(backend);
  return c10::InferenceMode::is_enabled()
      ? keys
      : keys | c10::getAutogradRelatedKeySetFromBackend(backend) |
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
}

/// Pages that are zero cost nothing until they are looked at.
c10::DataPtr zeros(size_t bytes) {
  void* memory = bytes > 0 ? std::calloc(1, bytes) : nullptr;
  TORCH_CHECK(bytes == 0 || memory, "guarded: out of memory");
  return {memory, memory, &std::free, c10::Device(c10::kCPU)};
}

} // namespace

c10::Storage Mirror::host_storage(const c10::Storage& device) {
  auto* memory = const_cast<void*>(device.data_ptr().get());
  const bool trial = of_ == Of::Zeros;
  return {
      c10::Storage::use_byte_size_t{},
      device.nbytes(),
      trial ? zeros(device.nbytes())
            : c10::DataPtr(memory, c10::Device(c10::kCPU)),
      trial ? c10::GetCPUAllocator() : nullptr,
      trial};
}

at::Tensor Mirror::on_host(const at::Tensor& x) {
  if (!is_guarded(x)) {
    return x;
  }
  const auto& device = x.storage();
  auto& host = by_device_[device.unsafeGetStorageImpl()];
  if (!host) {
    host = host_storage(device);
    by_host_.emplace(host.unsafeGetStorageImpl(), Known{device, x.key_set()});
    if (auto* block = block_of(device.data_ptr())) {
      uses_.push_back({block, block->owner});
    }
  }
  return make_tensor(host, new_keys(c10::DispatchKey::CPU), x);
}

bool Mirror::knows(const at::Tensor& made) const {
  return by_host_.count(made.storage().unsafeGetStorageImpl()) > 0;
}

at::Tensor Mirror::on_device(const at::Tensor& made) {
  const auto* host = made.storage().unsafeGetStorageImpl();
  auto known = by_host_.find(host);
  if (known == by_host_.end()) {
    const auto bytes = made.storage().nbytes();
    const c10::Storage device(
        c10::Storage::use_byte_size_t{},
        bytes,
        allocator()->allocate(bytes),
        allocator(),
        true);
    known = by_host_.emplace(host, Known{device, new_keys(kKey)}).first;
  }
  return make_tensor(known->second.device, known->second.keys, made);
}

} // namespace guarded
