#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "shardtensor/layout/mesh.h"
#include "shardtensor/layout/plans/transfer.h"

namespace shardtensor {

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

  int64_t bytes() const {
    return static_cast<int64_t>(sizeof(*this) + code.size() * sizeof(int64_t));
  }
};
EncodedExchange encode(const ExchangePlan& plan, const Mesh& mesh);

/// `format`: that of the whole tensor, the same on all ranks. Boxes of images
/// and volumes with channels last travel and arrive in that order.
at::Tensor exchange(
    const at::Tensor& x,
    const EncodedExchange& encoded,
    at::MemoryFormat format = at::MemoryFormat::Contiguous);

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

} // namespace shardtensor
