#include "shardtensor/tensor/known_zeros.h"

#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

int64_t version_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor._version());
}

} // namespace

void note_known_zeros(const at::Tensor& tensor, Box box) {
  auto* impl = impl_of(tensor);
  if (tensor.is_inference() || is_traced(impl->local())) {
    return;
  }
  if (!impl->known_zeros() || impl->knows_zeros_of_base()) {
    impl->set_known_zeros(std::make_shared<KnownZeros>());
  }
  *impl->known_zeros() = {std::move(box), version_of(tensor)};
}

const Box* nonzero_box(const at::Tensor& tensor) {
  const auto* impl = impl_of(tensor);
  const auto& known = impl->known_zeros();
  const bool holds = known && !impl->knows_zeros_of_base() &&
      !tensor.is_inference() && known->version == version_of(tensor);
  return holds ? &known->box : nullptr;
}

} // namespace shardtensor::detail
