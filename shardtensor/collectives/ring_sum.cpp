#include <algorithm>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "shardtensor/collectives/ring.h"
#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/transforms.h"

namespace shardtensor {

using namespace detail;

namespace {

using torch::autograd::variable_list;

constexpr auto kName = "ring_sum";

struct Ring {
  RingTerm term;
  std::vector<std::vector<int64_t>> sizes;
  std::string group;
};

/// Raises for what would drop what other ranks' blocks say of a derivative.
void check_mode_of(
    const at::Tensor& block,
    const std::vector<at::Tensor>& own) {
  for (const auto& x : own) {
    check_not_transformed(kName, x);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      !torch::autograd::isFwGradDefined(block),
      kName,
      ": expected a block without a forward-mode tangent, got one with; use "
      "reverse mode");
}

/// The ring has the sizes of its blocks afterwards.
at::Tensor sum_of_terms(
    Ring& ring,
    const at::Tensor& block,
    const std::vector<at::Tensor>& own,
    bool is_recorded) {
  at::Tensor sum;
  const auto meet = [&](const at::Tensor& piece) {
    const auto term = ring.term(piece, own);
    sum = sum.defined() ? sum + term : term;
  };
  RingStops stops;
  stops.own = [&] { meet(block); };
  stops.other = [&](int64_t, const at::Tensor& piece) {
    meet(piece);
    return at::Tensor();
  };
  ring.sizes = ring_tour_as(kName, block, ring.sizes, ring.group, stops, [&] {
    check_mode_of(block, own);
    return std::string(is_recorded ? ", recorded for backward" : "");
  });
  const auto is_input = [&](const at::Tensor& x) { return sum.is_alias_of(x); };
  return is_input(block) || std::ranges::any_of(own, is_input) ? sum.clone()
                                                               : sum;
}

/// The gradients of one term; undefined for what it does not depend on.
variable_list gradients_of_term(
    const RingTerm& term,
    const at::Tensor& block,
    const std::vector<at::Tensor>& own,
    const at::Tensor& grad) {
  const at::AutoGradMode recording(true);
  variable_list inputs;
  const auto leaf = [&](const at::Tensor& x) {
    const bool may = at::isFloatingType(x.scalar_type()) || x.is_complex();
    inputs.push_back(x.detach().requires_grad_(may));
    return inputs.back();
  };
  const auto own_block = leaf(block);
  std::vector<at::Tensor> rest;
  for (const auto& x : own) {
    rest.push_back(leaf(x));
  }
  const auto output = term(own_block, rest);
  variable_list wanted;
  for (const auto& x : inputs) {
    if (x.requires_grad()) {
      wanted.push_back(x);
    }
  }
  if (!output.requires_grad()) {
    return variable_list(inputs.size());
  }
  auto found = torch::autograd::grad(
      {output}, wanted, {grad}, std::nullopt, false, /*allow_unused=*/true);
  variable_list result(inputs.size());
  for (size_t i = 0, j = 0; i < inputs.size(); ++i) {
    if (inputs[i].requires_grad()) {
      result[i] = found[j++];
    }
  }
  return result;
}

/// Those of the own block, summed over all ranks' terms, and of `own`.
variable_list gradients_of_sum(
    const Ring& ring,
    const at::Tensor& block,
    const std::vector<at::Tensor>& own,
    const at::Tensor& grad) {
  variable_list sums{at::zeros_like(block)};
  for (const auto& x : own) {
    sums.push_back(at::zeros_like(x));
  }
  const auto meet = [&](const at::Tensor& piece) {
    const auto grads = gradients_of_term(ring.term, piece, own, grad);
    for (size_t i = 1; i < grads.size(); ++i) {
      if (grads[i].defined()) {
        sums[i].add_(grads[i]);
      }
    }
    return grads[0].defined() ? grads[0] : at::zeros_like(piece);
  };
  RingStops stops;
  stops.own = [&] { sums[0].add_(meet(block)); };
  stops.other = [&](int64_t, const at::Tensor& piece) { return meet(piece); };
  stops.returned = [&](const at::Tensor& term) { sums[0].add_(term); };
  ring_tour_as(kName, block, ring.sizes, ring.group, stops);
  return sums;
}

class RingSumTwice : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& /*gradients*/) override {
    TORCH_CHECK(false, "ring_sum: its gradient is not differentiable");
  }
};

class RingSumBackward : public torch::autograd::Node {
 public:
  RingSumBackward(Ring ring, const variable_list& inputs)
      : ring_(std::move(ring)), scope_(current_comm_scope()) {
    for (const auto& x : inputs) {
      saved_.emplace_back(x, false);
    }
  }

  std::string name() const override {
    return "RingSumBackward";
  }

  variable_list apply(variable_list&& gradients) override {
    const CommScope scope(backward_of(scope_));
    variable_list inputs;
    for (const auto& x : saved_) {
      inputs.push_back(x.unpack());
    }
    auto& grad = gradients[0];
    if (!grad.defined()) { // other ranks may have one, and wait
      grad = input_metadata(0).zeros_like();
    }
    variable_list result;
    {
      const at::NoGradGuard no_grad;
      const std::vector<at::Tensor> own(inputs.begin() + 1, inputs.end());
      result = gradients_of_sum(ring_, inputs[0], own, grad);
    }
    inputs.push_back(grad);
    for (const auto& x : result) {
      connect<RingSumTwice>(x, inputs);
    }
    return result;
  }
  void release_variables() override {
    for (auto& x : saved_) {
      x.reset_data();
    }
  }

 private:
  Ring ring_;
  std::vector<torch::autograd::SavedVariable> saved_;
  std::string scope_;
};

} // namespace

at::Tensor ring_sum(
    const RingTerm& term,
    const at::Tensor& block,
    const std::vector<at::Tensor>& own,
    const std::vector<std::vector<int64_t>>& sizes,
    const std::string& group) {
  Ring ring{term, sizes, group};
  variable_list inputs{block};
  inputs.insert(inputs.end(), own.begin(), own.end());
  const bool is_recorded =
      std::any_of(inputs.begin(), inputs.end(), needs_node);
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = sum_of_terms(ring, block, own, is_recorded);
  }
  connect<RingSumBackward>(result, inputs, std::move(ring), inputs);
  return result;
}

} // namespace shardtensor
