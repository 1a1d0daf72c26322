#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace shardtensor::detail {

/// Of the device, in this thread.
inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// Of x's device.
inline c10::Stream current_stream(const at::Tensor& x) {
  return current_stream(x.device());
}

} // namespace shardtensor::detail
