#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// Note [Moved views]
/// A view of a ShardTensor shares memory with it where every rank's part of the
/// view lies in its own part of the tensor. Where it does not (a row of a
/// sharded dim, two sharded dims merged) the view is made from a redistributed
/// copy. This object keeps both sides equal, as a view promises: what is
/// written into the view is brought back at once (push), what was written into
/// the viewed tensor is fetched before the view is read again (pull). Writes
/// are seen by PyTorch's version counter, which views share; ranks that run the
/// same program agree about it. Data that is also that of `x.data` has several:
/// a write into any such data makes all views look again.
///
/// Example: x is sharded on dim 0. x[3] is a copy of the owner's row on every
/// rank; x[3].zero_() writes into the copy, push() cuts each rank's part out of
/// it (the owner's row, nothing elsewhere) and writes it into x.
class MovedView {
 public:
  /// `copy`, laid out as `copy_spec`, is redistributed from `source`, which is
  /// laid out as `source_spec`; it shares no memory with it. `of` is the
  /// wrapper that `source` comes from.
  MovedView(
      at::Tensor copy,
      SpecPtr copy_spec,
      at::Tensor source,
      SpecPtr source_spec,
      const at::Tensor& of);

  /// Fetches what was written into the source since. Communication: none when
  /// nothing was, else a redistribution.
  void pull();
  /// Writes the copy into the source. Communication: a redistribution.
  void push();
  /// Makes the copy contiguous, before anybody looks at it, and returns it.
  const at::Tensor& pack();

 private:
  /// Changes with every write that may concern the source.
  std::array<int64_t, 2> writes() const;
  bool is_stale() const;
  void note_seen();

  at::Tensor copy_;
  SpecPtr copy_spec_;
  at::Tensor source_;
  SpecPtr source_spec_;
  std::shared_ptr<MovedView> outer_; // the source is such a copy, too
  c10::VariableVersion version_;
  bool has_version_ = false; // inference tensors have none
  std::array<int64_t, 2> seen_{};
};

/// What a view operator works on: the viewed tensor's local tensor, or a copy
/// of it in another layout.
struct ViewSource {
  at::Tensor local;
  std::shared_ptr<MovedView> moved;
};

/// `tensor` as a view operator wants it; null stands for the tensor's own
/// layout. Communication: none in the own layout, else a redistribution.
ViewSource view_source(const at::Tensor& tensor, const SpecPtr& wanted);
/// The same in contiguous memory, for a local view that cannot be had without.
ViewSource contiguous_source(ViewSource source, const at::Tensor& tensor);
/// The result of a view operator on `tensor`, with its nominal strides, and
/// where it begins in `tensor` by those, if that is known.
at::Tensor wrap_view(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::IntArrayRef strides,
    const at::Tensor& tensor,
    const ViewSource& source,
    std::optional<int64_t> offset = std::nullopt);

/// Says that an operator wrote into the local tensor of `tensor`. Every kernel
/// that does must say so: what `tensor` is a moved view of gets the values.
void note_written(const at::Tensor& tensor);

} // namespace shardtensor
