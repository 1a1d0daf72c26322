#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include "shardtensor/tensor/gradients/parameter_gradients.h"

namespace shardtensor::detail {

/// A backward node that completes gradients of parameters, by the policy under
/// which forward recorded it, not the one of the moment: modules of several
/// policies may share a backward.
class CompletingNode : public torch::autograd::Node {
 public:
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& grads) final;

  /// Whether its terms may be summed later.
  bool coalesces() const {
    return policy_ == GradientPolicy::Coalesced;
  }

  /// Its place in the forward, in whichever threads that was recorded: larger
  /// than those of nodes recorded before.
  uint64_t order() const {
    return order_;
  }

 protected:
  /// From the gradients to those of the next edges, by complete().
  virtual torch::autograd::variable_list complete_from(
      torch::autograd::variable_list&& grads) = 0;

  /// The complete gradients from this rank's terms, by this node's policy,
  /// inside a backward; this node's i-th edge leads to the parameter of
  /// terms[i]. Undefined where the policy sums later.
  std::vector<at::Tensor> complete(
      const std::vector<at::Tensor>& terms,
      const MeshPtr& mesh,
      const std::vector<int64_t>& axes) const;

 private:
  static uint64_t next_order();

  GradientPolicy policy_ = gradient_policy();
  uint64_t order_ = next_order();
};

} // namespace shardtensor::detail
