#include "shardtensor/tensor/moved_view.h"

#include <atomic>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor_impl.h"
#include "shardtensor/tensor/shown_elements.h"

namespace shardtensor {

using namespace detail;
namespace {

// Inference tensors have no version: any write makes their moved views stale.
std::atomic<int64_t> inference_writes{0};
// Data that tensors with versions of their own share: none of these tells.
std::atomic<int64_t> shared_data_writes{0};

} // namespace

MovedView::MovedView(
    at::Tensor copy,
    SpecPtr copy_spec,
    at::Tensor source,
    SpecPtr source_spec,
    const at::Tensor& of)
    : copy_(std::move(copy)),
      copy_spec_(std::move(copy_spec)),
      source_(std::move(source)),
      source_spec_(std::move(source_spec)),
      outer_(impl_of(of)->moved_view()),
      has_version_(!of.is_inference()) {
  if (has_version_) {
    version_ = of.unsafeGetTensorImpl()->version_counter();
  }
  note_seen();
}

std::array<int64_t, 2> MovedView::writes() const {
  return has_version_
      ? std::array<int64_t, 2>{version_.current_version(), shared_data_writes}
      : std::array<int64_t, 2>{inference_writes, 0};
}

bool MovedView::is_stale() const {
  return seen_ != writes();
}

void MovedView::note_seen() {
  seen_ = writes();
}

void MovedView::pull() {
  if (outer_) {
    outer_->pull();
  }
  if (is_stale()) {
    note_seen();
    std::optional<c10::InferenceMode> as_it_was_made;
    if (!has_version_) {
      as_it_was_made.emplace();
    }
    at::NoGradGuard no_grad;
    copy_.copy_(redistribute_local(source_, source_spec_, copy_spec_));
  }
}

void MovedView::push() {
  at::NoGradGuard no_grad;
  source_.copy_(redistribute_local(copy_, copy_spec_, source_spec_));
  if (outer_) {
    outer_->push();
  }
}

const at::Tensor& MovedView::pack() {
  copy_ = copy_.clone(at::MemoryFormat::Contiguous);
  return copy_;
}

ViewSource view_source(const at::Tensor& tensor, const SpecPtr& wanted) {
  auto* impl = impl_of(tensor);
  if (!impl->constant_view()) {
    impl->separate_elements();
  }
  const auto& local = impl->local();
  const auto& own = impl->spec();
  if (!wanted || wanted == own) {
    return {local, impl->moved_view()};
  }
  auto copy =
      redistribute_local(local, own, wanted, tensor.suggest_memory_format());
  if (copy.is_alias_of(local)) {
    copy = copy.clone();
  }
  return {copy, std::make_shared<MovedView>(copy, wanted, local, own, tensor)};
}

ViewSource contiguous_source(ViewSource source, const at::Tensor& tensor) {
  const auto* impl = impl_of(tensor);
  if (source.moved != impl->moved_view()) {
    source.local = source.moved->pack();
    return source;
  }
  auto copy = source.local.clone(at::MemoryFormat::Contiguous);
  return {
      copy,
      std::make_shared<MovedView>(
          copy, impl->spec(), source.local, impl->spec(), tensor)};
}

at::Tensor wrap_view(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::IntArrayRef strides,
    const at::Tensor& tensor,
    const ViewSource& source,
    std::optional<int64_t> offset) {
  const SameInference same(*impl_of(tensor));
  auto result = wrap(local, spec, strides);
  note_view_place(result, tensor, offset);
  const auto begin =
      tensor.storage_offset() * tensor.element_size() / result.element_size();
  impl_of(result)->set_storage_offset(begin + offset.value_or(0));
  impl_of(result)->set_moved_view(source.moved);
  impl_of(result)->set_shares_memory();
  impl_of(result)->set_known_zeros(
      impl_of(tensor)->known_zeros(), /*of_base=*/true);
  impl_of(tensor)->set_shares_memory();
  if (impl_of(tensor)->has_other_versions()) {
    impl_of(result)->note_other_version();
  }
  return result;
}

void note_written(const at::Tensor& tensor) {
  if (tensor.is_inference()) {
    inference_writes += 1;
  } else if (impl_of(tensor)->has_other_versions()) {
    shared_data_writes += 1;
  }
  if (const auto& moved = impl_of(tensor)->moved_view()) {
    moved->push();
  }
}

} // namespace shardtensor
