#include "shardtensor/tensor/shard_tensor_impl.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <typeinfo>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <c10/core/MemoryFormat.h>
#include <torch/csrc/autograd/graph_task.h>

#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/tensor/streams.h"

namespace shardtensor {
namespace {

std::atomic<BirthHook> birth_hook{nullptr};

void born(const at::Tensor& tensor) {
  if (auto hook = birth_hook.load(std::memory_order_acquire)) {
    hook(tensor);
  }
}

// For errors: who asks, where somebody has said so.
std::string in_scope() {
  const auto& scope = current_comm_scope();
  return scope.empty() ? scope : scope + ": ";
}

// For who reads a storage's data, as torch::save does.
constexpr auto kNoMemory =
    "a ShardTensor has no memory of its global sizes; expected a plain tensor: "
    "full_tensor() or to_local()";

c10::DispatchKeySet keys_of(const at::Tensor& local) {
  const auto backend = local.key_set().raw_repr() & c10::full_backend_mask;
  return c10::DispatchKeySet(c10::DispatchKeySet::RAW, backend) |
      c10::DispatchKeySet(
             {c10::DispatchKey::Dense, kFunctionKey, kDispatchKey});
}

} // namespace

// Note [Shared memory]
// Two wrappers of one local memory, a tensor and its view, have storages of
// their own. The engine adds gradients in place where a storage has one owner;
// it would write into the gradient of somebody else.

// Note [Gradients of another stream]
// Where a gradient comes from a node of another stream the engine has the
// reader wait, and tells the allocator of the reader by the gradient's storage,
// so that its memory is not handed out again before it was read. A wrapper's
// storage has no memory: what reads the local tensor in a backward says it.

ShardTensorImpl::ShardTensorImpl(
    at::Tensor local,
    SpecPtr spec,
    at::IntArrayRef strides)
    : TensorImpl(keys_of(local), local.dtype(), local.device()) {
  take(made(std::move(local), std::move(spec)), strides);
}

ShardTensorImpl::Held ShardTensorImpl::made(at::Tensor local, SpecPtr spec) {
  Held held;
  held.local = std::move(local);
  held.spec = std::move(spec);
  if (!held.local.is_cpu() && !is_traced(held.local)) {
    held.made_on = detail::current_stream(held.local);
  }
  return held;
}

void ShardTensorImpl::keep_for_other_stream() const {
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  const auto& local = held_.local;
  if (in_backward && detail::current_stream(local) != *held_.made_on) {
    local.record_stream(detail::current_stream(local));
  }
}

void ShardTensorImpl::take(Held held, at::IntArrayRef strides) {
  held_ = std::move(held);
  known_zeros_ = nullptr;
  view_place_ = {};
  show(strides);
}

/// Sizes and strides, and a storage of that size. A compiler takes one of no
/// bytes for one that was freed.
void ShardTensorImpl::show(at::IntArrayRef strides) {
  set_allow_tensor_metadata_change(true);
  if (strides.empty()) {
    set_sizes_contiguous(held_.spec->sizes());
  } else {
    set_sizes_and_strides(held_.spec->sizes(), strides);
  }
  const auto bytes = numel() * static_cast<int64_t>(held_.local.element_size());
  storage_ = c10::Storage(
      c10::Storage::use_byte_size_t{},
      std::max<int64_t>(bytes, 1),
      c10::DataPtr{nullptr, held_.local.device()},
      nullptr,
      false);
  auto* nothing = storage_.unsafeGetStorageImpl();
  nothing->set_throw_on_mutable_data_ptr();
  if (held_.local.is_cpu()) { // on devices the engine asks, see the note above
    nothing->release_data_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  }
  second_owner_ = storage_;
}

void ShardTensorImpl::set(
    at::Tensor local,
    SpecPtr spec,
    at::IntArrayRef strides) {
  auto held = made(std::move(local), std::move(spec));
  held.moved_view = held_.moved_view; // its base is told
  held.shares_memory = held_.shares_memory;
  ++times_set_;
  take(std::move(held), strides);
}

void ShardTensorImpl::take_written() {
  const auto seen = std::exchange(held_.constant_view, nullptr);
  const auto& whole = seen->constant->written();
  const auto part = seen->view ? seen->view(whole) : whole;
  const auto* impl = impl_of(part);
  auto held = made(impl->local(), impl->spec());
  held.moved_view = impl->held_.moved_view;
  held.shares_memory = true;
  ++times_set_;
  take(std::move(held), strides().vec());
  set_known_zeros(impl_of(whole)->known_zeros_, seen->view != nullptr);
}

void ShardTensorImpl::separate_elements() {
  if (held_.constant_view) {
    begin_write(*this);
    return;
  }
  auto& local = held_.local;
  if (local.is_non_overlapping_and_dense() || held_.shares_memory ||
      at::has_internal_overlap(local) != at::MemOverlap::Yes ||
      at::has_internal_overlap(this) == at::MemOverlap::Yes) {
    return;
  }
  local = local.clone(at::MemoryFormat::Contiguous);
}

c10::intrusive_ptr<c10::TensorImpl> ShardTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version_counter,
    bool allow_tensor_metadata_change) const {
  const SameInference same(*this);
  auto impl =
      c10::make_intrusive<ShardTensorImpl>(held_.local, held_.spec, strides());
  impl->set_storage_offset(storage_offset());
  if (version_counter.unique()) { // nobody else's
    note_other_version();
    impl->note_other_version();
    held_.shares_memory = true;
  }
  if (!impl->is_inference()) {
    impl->set_version_counter(version_counter);
  }
  impl->set_allow_tensor_metadata_change(allow_tensor_metadata_change);
  impl->set_python_dispatch(is_python_dispatch()); // the constructor drops it
  impl->held_ = held_;
  born(at::Tensor(impl));
  return impl;
}

c10::intrusive_ptr<c10::TensorImpl> ShardTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version_counter,
    bool allow_tensor_metadata_change) const {
  return shallow_copy_and_detach(
      static_cast<const c10::VariableVersion&>(version_counter),
      allow_tensor_metadata_change);
}

void ShardTensorImpl::release_resources() {
  TensorImpl::release_resources();
  held_.local.reset(); // the layout stays, which a leaf's hook asks for
  held_.moved_view.reset();
  second_owner_ = {};
  known_zeros_.reset();
  view_place_ = {};
}

void ShardTensorImpl::shallow_copy_from(
    const c10::intrusive_ptr<TensorImpl>& impl) {
  auto* other = dynamic_cast<ShardTensorImpl*>(impl.get());
  TORCH_CHECK_TYPE(
      other,
      "the data of a ShardTensor can only be set to a ShardTensor; make one "
      "with from_local(), or write into to_local()");
  TensorImpl::shallow_copy_from(impl);
  ++times_set_;
  take(other->held_, other->strides().vec());
  note_other_version();
  other->note_other_version();
}

void ShardTensorImpl::note_other_version() const {
  has_other_versions_ = true;
  if (known_zeros_) {
    known_zeros_->version = -1;
  }
  if (held_.constant_view) {
    held_.constant_view->constant->forget_zero();
  }
  if (view_place_.base) { // and of all its views
    static_cast<const ShardTensorImpl*>(view_place_.base.get())
        ->has_other_versions_ = true;
  }
}

ShardTensorImpl* impl_of(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  // Every operator asks; nothing is derived from it, so no dynamic_cast.
  TORCH_CHECK_TYPE(
      typeid(*impl) == typeid(ShardTensorImpl),
      in_scope(),
      "expected a ShardTensor, got a plain tensor of sizes ",
      tensor.sizes(),
      " (the .data of a plain tensor cannot be set to a ShardTensor)");
  auto* own = static_cast<ShardTensorImpl*>(impl);
  if (C10_UNLIKELY(own->is_outdated())) {
    own->take_written();
  }
  return own;
}

std::vector<int64_t> strides_of_format(
    at::MemoryFormat format,
    const std::vector<int64_t>& sizes) {
  if (format == at::MemoryFormat::ChannelsLast && sizes.size() == 4) {
    return c10::get_channels_last_strides_2d(sizes);
  }
  if (format == at::MemoryFormat::ChannelsLast3d && sizes.size() == 5) {
    return c10::get_channels_last_strides_3d(sizes);
  }
  return {};
}

at::Tensor wrap(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::IntArrayRef strides) {
  TORCH_CHECK_TYPE(
      local.layout() == at::kStrided,
      "a ShardTensor needs a strided local tensor, got layout ",
      local.layout());
  TORCH_CHECK_VALUE(
      local.sizes() == at::IntArrayRef(spec->local_sizes()),
      "the local tensor has sizes ",
      local.sizes(),
      " but rank ",
      spec->mesh()->position(),
      " of ",
      to_string(*spec),
      " holds ",
      at::IntArrayRef(spec->local_sizes()));
  detail::keep_backward_in_one_thread(local);
  auto tensor = at::detail::make_tensor<ShardTensorImpl>(local, spec, strides);
  if (is_traced(local)) {
    // Eager wrappers carry no Python key.
    tensor.unsafeGetTensorImpl()->set_python_dispatch(true);
  }
  born(tensor);
  return tensor;
}

void set_birth_hook(BirthHook hook) {
  birth_hook.store(hook, std::memory_order_release);
}

} // namespace shardtensor
