#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "shardtensor/layout/mesh.h"
#include "shardtensor/layout/placement.h"
#include "shardtensor/layout/transfer.h"

namespace shardtensor {

// The two primitives that everything else is made of. Both are functional
// TORCH_LIBRARY operators on plain local tensors (shardtensor::exchange,
// shardtensor::all_reduce), differentiable to any order, seen by torch.compile
// as one node. Thread safety / ordering: every rank of the group calls them in
// the same order. Errors name the operator under way (CommScope), this rank,
// its peers and the group.

/// Moves boxes of `x` between positions of `mesh` as `plan` says; returns this
/// position's new local tensor, of plan.target_sizes. Communication: one
/// message per peer and direction (none when all transfers are local), over
/// the mesh's group, or over one axis' group where plan.axis says so. The
/// gradient is the adjoint exchange. Raises when x's sizes are not
/// plan.source_sizes.
at::Tensor exchange(
    const at::Tensor& x,
    const ExchangePlan& plan,
    const Mesh& mesh);

/// An ExchangePlan with its group, as the integers that the operator takes.
/// Encode once and keep it where a plan is used again and again.
struct EncodedExchange {
  std::vector<int64_t> code;
  std::string group;
};
EncodedExchange encode(const ExchangePlan& plan, const Mesh& mesh);
at::Tensor exchange(const at::Tensor& x, const EncodedExchange& encoded);

/// exchange() of a tensor that has values, seen neither by autograd nor by a
/// compiler, for a node of one's own: `meanwhile` runs while the messages are
/// under way.
at::Tensor exchange_during(
    const at::Tensor& x,
    const EncodedExchange& encoded,
    c10::function_ref<void()> meanwhile);

/// The same, where what arrives is added to `target`, which `meanwhile` makes,
/// of the plan's target sizes.
void exchange_onto(
    at::Tensor& target,
    const at::Tensor& x,
    const EncodedExchange& encoded,
    c10::function_ref<void()> meanwhile);

/// The exchange that brings the gradient back.
EncodedExchange adjoint(const EncodedExchange& encoded);

/// The reduction of every rank's `x` (same shape and dtype on all), the same
/// on every rank. Communication: one all-reduce of x.numel() elements. The
/// adjoint of a sum is a sum, of an average an average; max, min and product
/// are not differentiable (they raise in backward). fp16 and bf16 sums travel
/// as they are. A group of one returns x itself.
at::Tensor all_reduce(
    const at::Tensor& x,
    Reduce reduce,
    const std::string& group);

/// all_reduce over several mesh axes: one call when they are all of the mesh's
/// axes, else one per axis. No axes: x itself.
at::Tensor all_reduce(
    const at::Tensor& x,
    Reduce reduce,
    const Mesh& mesh,
    const std::vector<int64_t>& axes);

/// Names what is being computed while it is alive, for error messages, the
/// profiler and the check mode: CommScope scope("aten::conv2d", spec text).
class CommScope {
 public:
  explicit CommScope(std::string what);
  ~CommScope();
  CommScope(const CommScope&) = delete;
  CommScope& operator=(const CommScope&) = delete;

 private:
  std::string outer_;
};

/// With the check mode on, ranks compare a hash of (operator, CommScope, plan
/// shape or sizes, dtype) before each collective; a mismatch raises the same
/// error on every rank, with each rank's description, instead of hanging.
void set_check_mode(bool on);
bool check_mode();

/// Bounds every wait, in seconds; 0 (the default) leaves the process group's
/// own time limit.
void set_communication_timeout(double seconds);

/// `before` is called before every wait for other ranks and `after` with its
/// result afterwards: Python gives up its lock meanwhile. Threads of the
/// process group need it to drop tensors, and callers such as x[3] hold it.
using BeforeWait = void* (*)();
using AfterWait = void (*)(void*);
void set_wait_hooks(BeforeWait before, AfterWait after);

/// Since the start or the last reset, on this rank.
struct CommStats {
  int64_t exchanges = 0; // calls with at least one message
  int64_t all_reduces = 0;
  int64_t messages = 0; // point-to-point pieces sent to other ranks
  int64_t bytes = 0; // sent to others; an all-reduce counts its tensor once
  double seconds = 0; // spent waiting
};
CommStats comm_stats();
void reset_comm_stats();

} // namespace shardtensor
