#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include "shardtensor/layout/placement.h"

namespace shardtensor::detail {

/// Says what was under way, for an error: "shardtensor::exchange of ...".
/// Called only when something failed.
using Describe = c10::function_ref<std::string()>;

/// How many elements go to, or come from, each rank of a group.
using Splits = std::vector<int64_t>;

/// A process group of PyTorch, found by its name. Does not keep it alive: a
/// tensor that outlives its job must not keep the backend's threads running,
/// and a call on a group that was destroyed is an error. Its .cpp and
/// gloo_messages are the only files of this folder that include c10d.
///
/// Every call below waits for its result and raises c10::DistBackendError that
/// names operator, CommScope, rank and group when the backend fails or
/// set_communication_timeout's limit has passed.
/// Thread safety / ordering: all ranks make the same calls in the same order.
class Group {
 public:
  explicit Group(const std::string& name);

  const std::string& name() const {
    return name_;
  }
  int64_t rank() const {
    return rank_;
  }
  int64_t ranks() const {
    return ranks_;
  }

  /// Moves in_splits[p] elements of `in` to each rank p and fills `out` with
  /// what they send; both are flat, contiguous and of the same dtype, any
  /// dtype. `largest_message` bounds the elements between any two ranks, the
  /// same on all of them: it decides how they travel. `meanwhile` runs between
  /// start and wait.
  void all_to_all(
      const at::Tensor& out,
      const Splits& out_splits,
      const at::Tensor& in,
      const Splits& in_splits,
      int64_t largest_message,
      Describe describe,
      c10::function_ref<void()> meanwhile) const;

  /// Reduces x in place, in its own dtype. Not Reduce::Avg.
  void all_reduce(const at::Tensor& x, Reduce reduce, Describe describe) const;

  /// Every rank's `row` (same flat size and dtype): a tensor (ranks, n).
  at::Tensor all_gather(const at::Tensor& row, Describe describe) const;

  /// "rank 1 of 4 in group 'dp'".
  std::string to_string() const;

 private:
  std::string name_;
  // A c10d::ProcessGroup.
  c10::weak_intrusive_ptr<c10::intrusive_ptr_target> process_group_;
  int64_t rank_ = 0;
  int64_t ranks_ = 0;
};

} // namespace shardtensor::detail
