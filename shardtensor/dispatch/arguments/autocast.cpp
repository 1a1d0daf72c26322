#include "shardtensor/dispatch/arguments/autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardtensor::detail {
namespace {

/// Autocast's key for the tensor's device, if autocast is on there.
std::optional<c10::DispatchKey> active_autocast_key(const at::Tensor& tensor) {
  const auto keys = c10::getAutocastRelatedKeySetFromBackend(
      tensor.key_set().highestBackendKey());
  if (keys.empty()) {
    return {};
  }
  const auto key = keys.highestPriorityTypeId();
  return c10::impl::tls_is_dispatch_key_excluded(key) ? std::nullopt
                                                      : std::optional(key);
}

} // namespace

bool autocast_lists(const char* op, const at::Tensor& tensor) {
  const auto key = active_autocast_key(tensor);
  if (!key) {
    return false;
  }
  const auto handle = c10::Dispatcher::singleton().findSchema({op, ""});
  return handle && handle->hasKernelForDispatchKey(*key);
}

at::Tensor autocast_to_float(const char* op, const at::Tensor& tensor) {
  return autocast_widens(op, tensor) ? tensor.to(at::kFloat) : tensor;
}

at::ScalarType autocast_lower_precision(const at::Tensor& tensor) {
  const auto device = tensor.device().type();
  const bool casts = tensor.is_floating_point() &&
      tensor.scalar_type() != at::kDouble &&
      at::autocast::is_autocast_available(device) &&
      at::autocast::is_autocast_enabled(device);
  return casts ? at::autocast::get_autocast_dtype(device)
               : tensor.scalar_type();
}

at::Tensor autocast_to_lower_precision(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(autocast_lower_precision(tensor))
                          : tensor;
}

} // namespace shardtensor::detail
