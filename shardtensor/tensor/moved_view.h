#pragma once

#include <array>
#include <cstdint>
#include <functional>
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
  /// Linear maps between local tensors.
  struct Ways {
    std::function<at::Tensor(const at::Tensor&)> to_copy;
    std::function<at::Tensor(const at::Tensor&)> to_source;
    /// Several places of the copies stand for one of the source, which
    /// `to_source` sums.
    bool shares_rows = false;
  };

  /// `copy` came from `source`, as `ways` says, and shares no memory with it.
  /// `outer` is not null where the source is such a copy, too. `of` is the
  /// wrapper that it all comes from.
  MovedView(
      at::Tensor copy,
      at::Tensor source,
      Ways ways,
      std::shared_ptr<MovedView> outer,
      const at::Tensor& of);

  /// Fetches what was written into the source since. Communication: none when
  /// nothing was, else a redistribution.
  void pull();
  /// Writes the copy into the source. Communication: a redistribution, and two
  /// more where rows are shared.
  void push();
  /// Whether this is, or is made from, a copy that shares rows.
  bool shares_rows() const {
    return ways_.shares_rows || (outer_ && outer_->shares_rows());
  }
  /// What was written into the copy is nothing: it is fetched anew.
  void forget();
  /// Makes the copy contiguous, before anybody looks at it, and returns it.
  const at::Tensor& pack();

 private:
  /// Changes with every write that may concern the source.
  std::array<int64_t, 2> writes() const;
  bool is_stale() const;
  void note_seen();
  void push_changes();

  at::Tensor copy_;
  at::Tensor source_;
  Ways ways_;
  std::shared_ptr<MovedView> outer_;
  bool pushes_changes_; // several places stand for one element of the source
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
