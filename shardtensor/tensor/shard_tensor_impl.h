#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/TensorImpl.h>

#include "shardtensor/layout/interval.h"
#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/tensor/constant.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/moved_view.h"

namespace shardtensor {

/// Where a view stands in the tensor that it was made from, by nominal strides:
/// see Note [Shown elements]. No base: no view, or none that may be an index.
struct ViewPlace {
  c10::intrusive_ptr<c10::TensorImpl> base;
  std::optional<int64_t> offset; // unless it is unknown
  int64_t times_set = 0; // the base's, at that time
};

/// See Note [Known zeros].
struct KnownZeros {
  Box box;
  int64_t version = -1; // of the tensor; -1: not known yet, or no longer
};

/// A tensor that shows its global sizes and holds one rank's shard: a plain
/// local tensor and the spec that places it. It owns a storage of the global
/// byte count with no memory behind it; reading it raises. All work is done by
/// the kernels on kFunctionKey and kDispatchKey.
///
/// Note [Nominal strides]
/// Strides are those that PyTorch would give the global tensor: contiguous for
/// new tensors (channels_last where an operand or a memory_format argument says
/// so and the operator keeps it, as convolutions, norms and pooling do; the
/// operands' order of dims where it works element by element), permuted and
/// sliced by view operators. They never come from the local memory: where a
/// shard has one row, or none, its strides are arbitrary, and what PyTorch
/// decides by strides (view or copy, steal a gradient or clone it) has to be
/// decided alike on every rank. The local tensor may be laid out in any way;
/// kernels look at its own strides.
class ShardTensorImpl final : public c10::TensorImpl {
 public:
  ShardTensorImpl(at::Tensor local, SpecPtr spec, at::IntArrayRef strides);

  /// Communication: none, but for a moved view whose base was written.
  const at::Tensor& local() const {
    if (held_.moved_view) {
      held_.moved_view->pull();
    }
    if (held_.made_on) {
      keep_for_other_stream();
    }
    return held_.local;
  }
  const SpecPtr& spec() const {
    return held_.spec;
  }
  /// New data under the same identity: what an in-place operator that changes
  /// sizes, `.data =` and a compiled graph do. Without strides: contiguous.
  void set(at::Tensor local, SpecPtr spec, at::IntArrayRef strides = {});

  /// Before somebody writes into the local tensor or makes a view of it: local
  /// elements that share memory (an expanded gradient) get memory of their own,
  /// unless the strides say that the whole tensor is an expanded one. A
  /// constant becomes an ordinary tensor. Without communication.
  void separate_elements();

  /// Not null for views that had to be redistributed, and for views of those:
  /// see Note [Moved views].
  const std::shared_ptr<MovedView>& moved_view() const {
    return held_.moved_view;
  }
  void set_moved_view(std::shared_ptr<MovedView> moved_view) {
    held_.moved_view = std::move(moved_view);
  }
  /// Not null for a constant that was not written, and for views of it: see
  /// Note [Constants].
  const std::shared_ptr<const ConstantView>& constant_view() const {
    return held_.constant_view;
  }
  void set_constant_view(std::shared_ptr<const ConstantView> constant_view) {
    held_.constant_view = std::move(constant_view);
  }
  /// The constant was written since: this shows the elements that it has now.
  bool is_outdated() const {
    return held_.constant_view && held_.constant_view->constant->is_written();
  }
  void take_written();

  /// Null where nothing is known of the values; may be outdated. A view has
  /// what its base knows, to end that where its data gets other versions.
  const std::shared_ptr<KnownZeros>& known_zeros() const {
    return known_zeros_;
  }
  void set_known_zeros(
      std::shared_ptr<KnownZeros> known_zeros,
      bool of_base = false) {
    known_zeros_ = std::move(known_zeros);
    known_zeros_of_base_ = of_base;
  }
  /// Whether it, or its base, knew zeros when it was last written.
  bool may_know_zeros() const {
    return known_zeros_ && known_zeros_->version >= 0;
  }
  bool knows_zeros_of_base() const {
    return known_zeros_of_base_;
  }

  /// True when a view operator made this tensor, or a view of it: it must keep
  /// its local tensor, others look at it.
  bool shares_memory() const {
    return held_.shares_memory;
  }
  void set_shares_memory() {
    held_.shares_memory = true;
  }

  /// How often it was given other data.
  int64_t times_set() const {
    return times_set_;
  }
  /// Whether its data is also that of a tensor with a version of its own, such
  /// as `x.data`: no version then tells when it is written.
  bool has_other_versions() const {
    return has_other_versions_;
  }
  void note_other_version() const;
  const ViewPlace& view_place() const {
    return view_place_;
  }
  void set_view_place(ViewPlace place) {
    view_place_ = std::move(place);
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      const c10::VariableVersion& version_counter,
      bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(
      c10::VariableVersion&& version_counter,
      bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;

  /// Weak references do not keep the memory.
  void release_resources() override;

  /// Who asks wants to read it: the profiler, which takes no for an answer.
  bool has_storage() const override {
    return false;
  }

 protected:
  const char* tensorimpl_type_name() const override {
    return "ShardTensorImpl";
  }

 private:
  /// What goes from tensor to tensor with the data.
  struct Held {
    at::Tensor local;
    SpecPtr spec;
    std::shared_ptr<MovedView> moved_view;
    std::shared_ptr<const ConstantView> constant_view;
    std::optional<c10::Stream> made_on; // Note [Gradients of another stream]
    mutable bool shares_memory = false;
  };

  /// Made here and now.
  static Held made(at::Tensor local, SpecPtr spec);
  /// Instead of what there was. Without strides: contiguous.
  void take(Held held, at::IntArrayRef strides);
  void show(at::IntArrayRef strides);
  void keep_for_other_stream() const;

  Held held_;
  // Note [Shared memory]: a second owner, so that autograd never takes this
  // tensor's memory for its own alone.
  c10::Storage second_owner_;
  std::shared_ptr<KnownZeros> known_zeros_;
  ViewPlace view_place_;
  int64_t times_set_ = 0;
  mutable bool has_other_versions_ = false;
  bool known_zeros_of_base_ = false;
};

/// True for every tensor that this library made.
inline bool is_shard_tensor(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(kDispatchKey);
}

/// True for a local tensor that torch.compile traces with: it has no values.
inline bool is_traced(const at::Tensor& local) {
  return local.key_set().has_any(
      c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::Functionalize}));
}

/// True for a local tensor of which only the sizes are known.
inline bool has_no_values(const at::Tensor& local) {
  return local.is_meta() || is_traced(local);
}

/// The implementation behind a ShardTensor. Raises for a plain tensor, also
/// for one whose `.data` was set to a ShardTensor.
ShardTensorImpl* impl_of(const at::Tensor& tensor);

/// The one birthplace: a new wrapper around `local`, which must not require
/// grad and must have spec's local sizes on this rank. Without strides it is a
/// contiguous one (Note [Nominal strides]). No autograd history, no
/// communication.
at::Tensor wrap(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::IntArrayRef strides = {});

/// The strides of a channels-last tensor of these sizes; none in another format
/// or with other dims.
std::vector<int64_t> strides_of_format(
    at::MemoryFormat format,
    const std::vector<int64_t>& sizes);

/// While it lives new tensors are inference tensors where `source` is one: a
/// view and a detached tensor are what their source is, whatever the mode.
class SameInference {
 public:
  explicit SameInference(const c10::TensorImpl& source) {
    const bool is_inference =
        !source.key_set().has_any(c10::inplace_or_view_ks);
    if (is_inference != c10::InferenceMode::is_enabled()) {
      mode_.emplace(is_inference);
    }
  }

 private:
  std::optional<c10::InferenceMode> mode_;
};

/// Called with every new wrapper: the Python package gives it its class there.
/// The C++ library runs without.
using BirthHook = void (*)(const at::Tensor&);
void set_birth_hook(BirthHook hook);

} // namespace shardtensor
