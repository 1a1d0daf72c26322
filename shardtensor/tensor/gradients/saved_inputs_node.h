#pragma once

#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/tensor/gradients/tangent.h"

namespace shardtensor::detail {

/// The node of an operator of one output whose gradients need some of its
/// inputs, which it keeps until the graph is released.
class SavedInputsNode : public torch::autograd::Node {
 public:
  using variable_list = torch::autograd::variable_list;

  explicit SavedInputsNode(const variable_list& inputs) {
    for (const auto& input : inputs) {
      saved_.emplace_back(input, /*is_output=*/false);
    }
  }

  void release_variables() final {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved_) {
      variable.reset_data();
    }
    release();
  }

  variable_list apply(variable_list&& grads) final {
    if (!grads[0].defined()) {
      return variable_list(num_outputs());
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    variable_list inputs;
    for (auto& variable : saved_) {
      inputs.push_back(variable.unpack());
    }
    return gradients(
        grads[0],
        inputs,
        at::GradMode::is_enabled() || has_tangent({grads[0]}));
  }

 protected:
  /// One gradient per edge; what nobody asked for (wants) may be undefined.
  /// `differentiable`: made of operators that have gradients themselves.
  virtual variable_list gradients(
      const at::Tensor& grad,
      const variable_list& inputs,
      bool differentiable) = 0;

  /// Lets go of what a node keeps beside its inputs.
  virtual void release() {}

  bool wants(size_t edge) const {
    return task_should_compute_output(edge);
  }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
};

} // namespace shardtensor::detail
