#include "shardtensor/rules/stencil/run_stencil.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardtensor::detail {

namespace {

using PlainCall = std::function<at::Tensor(const at::Tensor&)>;

/// plain(empty); its errors are those of an input of x's own sizes.
at::Tensor infer_empty(
    const PlainCall& plain,
    const at::Tensor& empty,
    const at::Tensor& x) {
  try {
    return plain(empty);
  } catch (const c10::Error&) {
    plain(at::empty({1}, empty.options()).expand(x.sizes()));
    throw;
  }
}

} // namespace

std::vector<int64_t> infer_sizes(
    const char* op,
    const at::Tensor& x,
    int64_t dims,
    const std::function<at::Tensor(const at::Tensor&)>& plain) {
  TORCH_CHECK(
      x.dim() > dims,
      op,
      ": expected an input of at least ",
      dims + 1,
      " dims, got sizes ",
      x.sizes());
  at::NoGradGuard no_grad;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto options = at::TensorOptions().dtype(at::kFloat).device(x.device());
  const bool batched = x.dim() > dims + 1;
  auto sizes = x.sizes().vec();
  if (!batched && x.numel() == 0) { // the first dim alone may be empty
    return infer_empty(plain, at::empty(sizes, options), x).sizes().vec();
  }
  if (!batched) {
    sizes.insert(sizes.begin(), 0);
  }
  sizes[0] = x.is_meta() ? 1 : 0; // Meta kernels in Python refuse none
  auto result = infer_empty(plain, at::empty(sizes, options), x).sizes().vec();
  if (batched) {
    result[0] = x.size(0);
  } else {
    result.erase(result.begin());
  }
  return result;
}

} // namespace shardtensor::detail
