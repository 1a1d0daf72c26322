#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace shardtensor::detail {

/// One of this library's operators (library.cpp), to call with its C++
/// signature. Keep it in a static.
template <class Signature>
auto find_own_operator(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

} // namespace shardtensor::detail
