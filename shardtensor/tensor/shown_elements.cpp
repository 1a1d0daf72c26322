#include "shardtensor/tensor/shown_elements.h"

#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {

bool ShownElements::operator==(const ShownElements& other) const {
  // A weak pointer keeps the address from being used again.
  return is_known() && layout_ == other.layout_ &&
      base_._unsafe_get_target() == other.base_._unsafe_get_target() &&
      changes_ == other.changes_ && offset_ == other.offset_ &&
      strides_ == other.strides_;
}

ShownElements shown_elements(const at::Tensor& tensor) {
  const auto* impl = impl_of(tensor);
  const auto& place = impl->view_place();
  const auto viewed = place.base ? at::Tensor(place.base) : tensor;
  const auto base = place.offset ? viewed : tensor;
  ShownElements shown;
  if (tensor.is_inference() || base.is_inference() ||
      impl->has_other_versions() || impl_of(viewed)->has_other_versions()) {
    return shown;
  }
  shown.base_ = ShownElements::Weak(base.getIntrusivePtr());
  // A view has its base's version, or one of its own where a kernel made it,
  // which stays 0 as nobody but the kernel sees it.
  const auto version = static_cast<int64_t>(base._version());
  const auto own = static_cast<int64_t>(tensor._version());
  shown.changes_ = {
      version,
      own == version ? 0 : own,
      place.base ? place.times_set : impl->times_set()};
  shown.offset_ = place.offset.value_or(0);
  shown.strides_ = tensor.strides().vec();
  shown.layout_ = impl->spec();
  return shown;
}

void note_view_place(
    const at::Tensor& view,
    const at::Tensor& tensor,
    std::optional<int64_t> offset) {
  const auto dtype = view.scalar_type();
  const bool is_asked = at::isIntegralType(dtype, false) || view.is_complex();
  if (!is_asked || dtype != tensor.scalar_type()) {
    return;
  }
  auto place = impl_of(tensor)->view_place();
  if (!place.base) {
    place = {tensor.getIntrusivePtr(), 0, impl_of(tensor)->times_set()};
  }
  place.offset = place.offset && offset ? std::optional(*place.offset + *offset)
                                        : std::nullopt;
  impl_of(view)->set_view_place(std::move(place));
}

} // namespace shardtensor::detail
