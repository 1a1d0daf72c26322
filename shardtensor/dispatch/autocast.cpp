#include "shardtensor/dispatch/autocast.h"

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

at::Tensor autocast_to_float(const char* op, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_floating_point() ||
      tensor.scalar_type() == at::kDouble ||
      tensor.scalar_type() == at::kFloat) {
    return tensor;
  }
  const auto key = active_autocast_key(tensor);
  if (!key) {
    return tensor;
  }
  const auto handle = c10::Dispatcher::singleton().findSchema({op, ""});
  return handle && handle->hasKernelForDispatchKey(*key) ? tensor.to(at::kFloat)
                                                         : tensor;
}

} // namespace shardtensor::detail
