#include <torch/library.h>

#include "shardtensor/dispatch/kernel.h"

// What programs say about a tensor's memory is about this rank's piece.

namespace shardtensor::detail {
namespace {

void record_stream_kernel(at::Tensor& self, at::Stream stream) {
  impl_of(self)->local().record_stream(stream);
}

bool is_pinned_kernel(
    const at::Tensor& self,
    std::optional<at::Device> device) {
  return impl_of(self)->local().is_pinned(device);
}

at::Tensor pin_memory_kernel(
    const at::Tensor& self,
    std::optional<at::Device> device) {
  const auto* impl = impl_of(self);
  return wrap(impl->local().pin_memory(device), impl->spec(), self.strides());
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("record_stream", record_stream_kernel);
  m.impl("is_pinned", is_pinned_kernel);
  m.impl("_pin_memory", pin_memory_kernel);
}

} // namespace shardtensor::detail
