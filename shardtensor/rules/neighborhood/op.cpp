#include "shardtensor/rules/neighborhood/op.h"

#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "shardtensor/comm/own_operator.h"
#include "shardtensor/rules/neighborhood/by_natten.h"
#include "shardtensor/rules/neighborhood/by_windows.h"
#include "shardtensor/rules/neighborhood/kernel.h"
#include "shardtensor/tensor/gradients/saved_inputs_node.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using Forward = std::tuple<Tensor, Tensor>;
using Backward = std::tuple<Tensor, Tensor, Tensor>;

Forward both(const NeighborhoodOutput& attended) {
  return {attended.output, attended.log_sum};
}

// ---- the kernels ------------------------------------------------------------

Forward forward_cpu(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    c10::IntArrayRef code,
    double scale) {
  return both(
      attend_neighborhood(query, key, value, decode_neighborhood(code), scale));
}

Forward forward_elsewhere(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    c10::IntArrayRef code,
    double scale) {
  const auto dims = decode_neighborhood(code);
  if (const auto out = attend_by_natten(query, key, value, dims, scale)) {
    return both(*out);
  }
  return both(
      attend_windows(query, key, value, dims, scale, /*in_parts=*/true));
}

Forward neighborhood_meta(
    const Tensor& query,
    const Tensor&,
    const Tensor& value,
    c10::IntArrayRef,
    double) {
  auto sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  const auto output = at::empty(sizes, query.options());
  sizes.pop_back();
  const auto type = at::toOpMathType(query.scalar_type());
  return {output, at::empty(sizes, query.options().dtype(type))};
}

Backward backward_cpu(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor& output,
    const Tensor& log_sum,
    c10::IntArrayRef code,
    double scale) {
  return attend_neighborhood_backward(
      grad,
      query,
      key,
      value,
      {output, log_sum},
      decode_neighborhood(code),
      scale);
}

Backward backward_elsewhere(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor&,
    const Tensor&,
    c10::IntArrayRef code,
    double scale) {
  const auto dims = decode_neighborhood(code);
  if (auto grads =
          attend_by_natten_backward(grad, query, key, value, dims, scale)) {
    return *std::move(grads);
  }
  return attend_windows_backward(
      grad, query, key, value, dims, scale, /*in_parts=*/true);
}

Backward neighborhood_backward_meta(
    const Tensor&,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const Tensor&,
    const Tensor&,
    c10::IntArrayRef,
    double) {
  const auto like = [](const Tensor& x) {
    return at::empty(x.sizes(), x.options());
  };
  return {like(query), like(key), like(value)};
}

// ---- autograd ---------------------------------------------------------------

const auto& forward_operator() {
  static const auto op = find_own_operator<decltype(forward_cpu)>(
      "shardtensor::_neighborhood_attention");
  return op;
}

struct NeighborhoodBackward : SavedInputsNode {
  NeighborhoodBackward(
      const variable_list& saved,
      c10::IntArrayRef code,
      double scale)
      : SavedInputsNode(saved), code_(code.vec()), scale_(scale) {}

  std::string name() const override {
    return "ShardTensorNeighborhoodAttentionBackward";
  }
  variable_list gradients(
      const Tensor& grad,
      const variable_list& inputs,
      bool differentiable) override {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::autocast_dispatch_keyset);
    const auto [query, key, value] = differentiable
        ? attend_windows_backward(
              grad,
              inputs[0],
              inputs[1],
              inputs[2],
              decode_neighborhood(code_),
              scale_,
              /*in_parts=*/false)
        : by_kernel(grad, inputs);
    return {query, key, value};
  }
  Backward by_kernel(const Tensor& grad, const variable_list& inputs) {
    static const auto op = find_own_operator<decltype(backward_cpu)>(
        "shardtensor::_neighborhood_attention_backward");
    return op.call(
        grad,
        inputs[0],
        inputs[1],
        inputs[2],
        inputs[3],
        inputs[4],
        code_,
        scale_);
  }

  std::vector<int64_t> code_;
  double scale_;
};

Forward forward_autograd(
    c10::DispatchKeySet keys,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    c10::IntArrayRef code,
    double scale) {
  if (has_tangent({query, key, value})) {
    return both(attend_windows(
        query,
        key,
        value,
        decode_neighborhood(code),
        scale,
        /*in_parts=*/false));
  }
  Tensor output;
  Tensor log_sum;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(output, log_sum) = forward_operator().redispatch(
        keys & c10::after_autograd_keyset, query, key, value, code, scale);
  }
  const variable_list inputs{query, key, value};
  connect<NeighborhoodBackward>(
      output,
      inputs,
      variable_list{query, key, value, output.detach(), log_sum},
      code,
      scale);
  return {output, log_sum};
}

} // namespace

Tensor attend_piece(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return std::get<0>(
      forward_operator().call(query, key, value, encode(dims), scale));
}

TORCH_LIBRARY_IMPL(shardtensor, CPU, m) {
  m.impl("_neighborhood_attention", forward_cpu);
  m.impl("_neighborhood_attention_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("_neighborhood_attention", forward_elsewhere);
  m.impl("_neighborhood_attention_backward", backward_elsewhere);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("_neighborhood_attention", neighborhood_meta);
  m.impl("_neighborhood_attention_backward", neighborhood_backward_meta);
}
TORCH_LIBRARY_IMPL(shardtensor, Autograd, m) {
  m.impl("_neighborhood_attention", forward_autograd);
}

} // namespace shardtensor::detail
