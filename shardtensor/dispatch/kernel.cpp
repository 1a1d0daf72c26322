#include "shardtensor/dispatch/kernel.h"

#include "shardtensor/dispatch/arguments/overlap.h"
#include "shardtensor/tensor/redistribute.h"

namespace shardtensor {

using namespace detail;

Local local_of(const at::Tensor& tensor) {
  return local_of(tensor, without_partial(spec(tensor)));
}

Local local_of(const at::Tensor& tensor, const SpecPtr& wanted) {
  if (!is_shard_tensor(tensor)) {
    return {redistribute_local(tensor, replicated(wanted), wanted), wanted};
  }
  const auto* impl = impl_of(tensor);
  return {
      redistribute_local(
          impl->local(), impl->spec(), wanted, tensor.suggest_memory_format()),
      wanted};
}

void write_local(
    const at::Tensor& tensor,
    const at::Tensor& local,
    const SpecPtr& spec) {
  auto* impl = impl_of(tensor);
  if (impl->spec() != spec && impl->spec()->has_partial() &&
      !impl->shares_memory()) {
    impl->set(local, spec, tensor.strides());
  } else if (!local.is_same(impl->local())) {
    check_places_apart("write", tensor);
    impl->separate_elements();
    const auto own = redistribute_local(
        local, spec, impl->spec(), tensor.suggest_memory_format());
    impl->local().copy_(readable_beside(own, impl->local()));
  }
  note_written(tensor);
}

LocalToWrite::LocalToWrite(const at::Tensor& tensor, SpecPtr wanted)
    : tensor_(tensor), wanted_(std::move(wanted)) {
  auto* impl = impl_of(tensor);
  impl->separate_elements();
  local_ = local_of(tensor, wanted_).tensor;
  if (wanted_ != impl->spec() && local_.is_alias_of(impl->local())) {
    local_ = local_.clone();
  }
}

void LocalToWrite::finish() const {
  write_local(tensor_, local_, wanted_);
}

} // namespace shardtensor
