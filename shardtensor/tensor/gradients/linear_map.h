#pragma once

#include <memory>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>

#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/tensor/gradients/tangent.h"

namespace shardtensor::detail {

// Functions of local tensors that are linear in them: the gradient is the
// adjoint's value, and the other way round. A plan says what they do; its
// kNodeName is what autograd shows.

template <class Plan>
using LinearFunction = at::Tensor (*)(const at::Tensor&, const Plan&);

/// value(x, plan). Differentiable to any order and in forward mode.
template <class Plan, LinearFunction<Plan> value, LinearFunction<Plan> adjoint>
at::Tensor apply_linear(
    const at::Tensor& x,
    const std::shared_ptr<const Plan>& plan);

template <class Plan, LinearFunction<Plan> value, LinearFunction<Plan> adjoint>
struct LinearNode : torch::autograd::Node {
  explicit LinearNode(std::shared_ptr<const Plan> plan)
      : scope_(current_comm_scope()), plan_(std::move(plan)) {}

  std::string name() const override {
    return Plan::kNodeName;
  }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    const CommScope scope(backward_of(scope_));
    return {apply_linear<Plan, adjoint, value>(grads[0], plan_)};
  }

  std::string scope_;
  std::shared_ptr<const Plan> plan_;
};

template <class Plan, LinearFunction<Plan> value, LinearFunction<Plan> adjoint>
at::Tensor apply_linear(
    const at::Tensor& x,
    const std::shared_ptr<const Plan>& plan) {
  at::Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = value(x, *plan);
  }
  connect<LinearNode<Plan, value, adjoint>>(result, x, plan);
  carry_tangent(result, x, [&](const at::Tensor& tangent) {
    return apply_linear<Plan, value, adjoint>(tangent, plan);
  });
  return result;
}

} // namespace shardtensor::detail
