#pragma once

// See ../context.h.

namespace gloo::transport {
class Device;
struct UnboundBuffer {
  virtual ~UnboundBuffer() = default;
};
} // namespace gloo::transport
