#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

#include "shardtensor/layout/placement.h"

namespace shardtensor::detail {

/// Says what was under way, for an error: "shardtensor::exchange of ...".
/// Called only when something failed.
using Describe = c10::function_ref<std::string()>;

/// How many elements go to, or come from, one rank of a group.
struct Split {
  int64_t rank;
  int64_t elements;
};
/// Those of the ranks that get or send something, in rank order: neighbours
/// have a list of neighbours, however large the group.
using Splits = std::vector<Split>;
/// "rank 1: 2, rank 3: 2", at most 16 of them; "none".
std::string to_string(const Splits& splits);
/// As collectives want them: a number for each rank.
std::vector<int64_t> of_every_rank(const Splits& splits, int64_t ranks);

/// What all ranks of a group know of an exchange, the same on all of them. It
/// decides how data travels.
struct Traffic {
  std::optional<int64_t> largest = 0; // elements between two ranks, at most
  int64_t peers = -1; // that a rank sends to, on average; -1: not known
};

/// A call under way: until wait() the backend may read and write its tensors.
/// One that nobody waited for is waited for when it goes, and what it raises
/// then is lost: all ranks have started it, so it comes to an end.
class Started {
 public:
  Started() = default; // nothing to wait for
  explicit Started(std::function<void()> wait) : wait_(std::move(wait)) {}
  Started(Started&& other) noexcept
      : wait_(std::exchange(other.wait_, nullptr)) {}
  Started& operator=(Started&& other) noexcept {
    std::swap(wait_, other.wait_);
    return *this;
  }
  ~Started();

  /// Once. Raises what the call would have raised.
  void wait();

 private:
  std::function<void()> wait_;
};

/// A process group of PyTorch, found by its name. Does not keep it alive: a
/// tensor that outlives its job must not keep the backend's threads running,
/// and a call on a group that was destroyed is an error. Its .cpp, messages and
/// roll_call are the only files of this folder that include c10d.
///
/// Every call below waits for its result, unless it says otherwise, and raises
/// c10::DistBackendError that names operator, CommScope, rank and group when
/// the backend fails or set_communication_timeout's limit has passed.
///
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

  /// Moves the parts of `in`, one behind the other, to the ranks of in_splits
  /// and fills `out` with what those of out_splits send; both are flat,
  /// contiguous and of the same dtype, any dtype. `meanwhile` runs between
  /// start and wait.
  void all_to_all(
      const at::Tensor& out,
      const Splits& out_splits,
      const at::Tensor& in,
      const Splits& in_splits,
      Traffic traffic,
      Describe describe,
      c10::function_ref<void()> meanwhile) const;

  /// Reduces x in place, in its own dtype. Not Reduce::Avg.
  void all_reduce(const at::Tensor& x, Reduce reduce, Describe describe) const;

  /// The same, not waited for. `what` names it in errors. MPI runs the second
  /// half of it in wait(): nothing else makes progress there.
  Started start_all_reduce(
      const at::Tensor& x,
      Reduce reduce,
      const std::string& what) const;

  /// Every rank's `row` (same flat size and dtype): a tensor (ranks, n).
  at::Tensor all_gather(const at::Tensor& row, Describe describe) const;

  /// The same of a flat x into the flat `all`, any dtype, by one call of the
  /// backend. Faster than messages where gathers_at_once(x).
  void all_gather_into(
      const at::Tensor& all,
      const at::Tensor& x,
      Describe describe) const;
  bool gathers_at_once(const at::Tensor& x) const;

  /// True where it has messages for tensors in host memory, beside others.
  bool moves_host_tensors() const;
  /// Where ranks tell each other numbers: the same for all of them, and the
  /// host where that can be, for nothing else is under way there.
  c10::Device device_of_numbers() const;

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
