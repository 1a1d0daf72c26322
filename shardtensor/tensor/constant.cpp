#include "shardtensor/tensor/constant.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include "shardtensor/layout/plans/constant_layout.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor {

using namespace detail;

std::optional<ViewGeometry> geometry(const ConstantView& seen) {
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const auto dtype = seen.constant->dtype();
  const auto whole = at::empty(
      seen.constant->sizes(), at::TensorOptions(at::kMeta).dtype(dtype));
  const auto part = seen.view ? seen.view(whole) : whole;
  ViewGeometry found{
      part.sizes().vec(), part.strides().vec(), part.storage_offset()};
  if (part.scalar_type() == dtype) {
    return found;
  }
  if (part.scalar_type() != c10::toRealValueType(dtype)) {
    return {};
  }
  found.offset /= 2; // in complex numbers
  for (auto& stride : found.strides) {
    stride = stride % 2 == 0 ? stride / 2 : 0;
  }
  return found;
}

Constant::Constant(
    at::Tensor value,
    MeshPtr mesh,
    std::vector<int64_t> sizes,
    bool is_zero)
    : value_(std::move(value)),
      mesh_(std::move(mesh)),
      sizes_(std::move(sizes)),
      is_zero_(is_zero) {}

void Constant::write(const SpecPtr& layout, at::TensorImpl& target) {
  const at::AutoDispatchBelowADInplaceOrView below;
  written_ = wrap(
      value_.expand(layout->local_sizes()).clone(at::MemoryFormat::Contiguous),
      layout);
  if (is_zero_) {
    // For whoever takes this memory before the write is done.
    impl_of(written_)->set_known_zeros(std::make_shared<KnownZeros>());
  }
  if (!written_.is_inference() && !target.is_inference()) {
    // Moved views look there for later writes.
    written_.unsafeGetTensorImpl()->set_version_counter(
        target.version_counter());
  }
}

void Constant::forget_zero() {
  is_zero_ = false;
  if (written_.defined()) {
    const auto& known = impl_of(written_)->known_zeros();
    if (known) {
      known->version = -1;
    }
  }
}

at::Tensor constant(
    const at::Tensor& value,
    const MeshPtr& mesh,
    std::vector<int64_t> sizes,
    bool is_zero) {
  TORCH_CHECK_TYPE(
      !is_shard_tensor(value) && value.dim() == 0,
      "constant: expected a plain 0-d tensor, got sizes ",
      value.sizes());
  const auto spec = make_replicated(mesh, sizes);
  auto result = wrap(value.detach().expand(spec->local_sizes()), spec);
  auto whole = std::make_shared<Constant>(
      value.detach(), mesh, std::move(sizes), is_zero);
  impl_of(result)->set_constant_view(
      std::make_shared<const ConstantView>(
          ConstantView{std::move(whole), nullptr}));
  return result;
}

const ConstantView* constant_view_of(const at::Tensor& tensor) {
  return impl_of(tensor)->constant_view().get();
}

void begin_write(ShardTensorImpl& tensor, const SpecPtr& value) {
  const auto seen = tensor.constant_view();
  if (!seen) {
    return;
  }
  const auto& sizes = seen->constant->sizes();
  const auto shown = value ? geometry(*seen) : std::nullopt;
  seen->constant->write(
      shown ? layout_of_written(sizes, *shown, value)
            : make_replicated(seen->constant->mesh(), sizes),
      tensor);
  tensor.take_written();
}

} // namespace shardtensor
