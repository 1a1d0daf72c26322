#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace shardtensor::detail {

/// Of x's device, in this thread.
inline c10::Stream current_stream(const at::Tensor& x) {
  return c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device());
}

} // namespace shardtensor::detail
