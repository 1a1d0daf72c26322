#include "shardtensor/rules/stencil/conv_overlap.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/tensor/gradients/saved_inputs_node.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using Plan = std::shared_ptr<const ConvOverlap>;

// ---- planning ---------------------------------------------------------------

/// Every piece's way to overlap; empty when one has none.
std::vector<OverlapPiece> overlap_pieces(
    const Stencil& stencil,
    const Partition& inputs,
    const Partition& outputs) {
  std::vector<OverlapPiece> pieces;
  for (int64_t p = 0; p < inputs.pieces(); ++p) {
    const auto piece = stencil.overlap(outputs.interval(p), inputs.interval(p));
    if (!piece) {
      return {};
    }
    pieces.push_back(*piece);
  }
  return pieces;
}

} // namespace

Plan plan_conv_overlap(
    const StencilCall& joined,
    at::MemoryFormat format,
    const std::vector<Stencil>& stencils,
    const std::vector<int64_t>& joined_padding,
    const std::vector<int64_t>& stride,
    const std::vector<int64_t>& dilation,
    int64_t groups) {
  const auto& input = *joined.input;
  const int64_t gathering = find_overlap_stencil(joined, stencils);
  if (gathering < 0) {
    return nullptr;
  }
  const int64_t dim = joined.first_dim() + gathering;
  const auto pieces = overlap_pieces(
      stencils[gathering], input.partition(dim), joined.output->partition(dim));
  if (pieces.empty()) {
    return nullptr;
  }
  const auto& own = pieces[input.piece(dim, input.mesh()->position())];
  auto plan = std::make_shared<ConvOverlap>();
  plan->format = format;
  plan->joined = joined;
  plan->joined_padding = joined_padding;
  plan->return_joined = adjoint(in_format(joined.gather, format));
  plan->work.stride = stride;
  plan->work.dilation = dilation;
  plan->work.groups = groups;
  plan->work.padding = joined_padding;
  plan->work.padding[gathering] = own.padding;
  plan->work.slab = plan_slab(joined, dim, pieces, format);
  return plan;
}

namespace {

// ---- autograd ---------------------------------------------------------------

/// By differentiable operators on joined rows, for double backward.
OverlapGradients joined_gradients(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const std::array<bool, 3>& wanted,
    const ConvOverlap& plan) {
  const auto rows = gather_rows(x, plan.joined, plan.format);
  auto result = convolution_gradients(
      grad, rows, weight, plan.joined_padding, wanted, plan.work);
  if (wanted[0]) {
    result.x = exchange(result.x, plan.return_joined);
  }
  return result;
}

struct ConvOverlapBackward : SavedInputsNode {
  ConvOverlapBackward(
      const Tensor& x,
      const Tensor& slab,
      const Tensor& weight,
      Plan plan)
      : SavedInputsNode({x, slab, weight}),
        scope_(current_comm_scope()),
        plan_(std::move(plan)) {}

  std::string name() const override {
    return "ShardTensorConvBackward";
  }
  variable_list gradients(
      const Tensor& grad,
      const variable_list& inputs,
      bool differentiable) override {
    const auto& [x, slab, weight] = std::tie(inputs[0], inputs[1], inputs[2]);
    const std::array<bool, 3> wanted{wants(0), wants(1), wants(2)};
    const CommScope scope(backward_of(scope_));
    const auto result = differentiable
        ? joined_gradients(grad, x, weight, wanted, *plan_)
        : convolve_overlapped_backward(
              grad, x, slab, weight, wanted, plan_->work);
    return {result.x, result.weight, result.bias};
  }

  std::string scope_;
  Plan plan_;
};

} // namespace

Tensor conv_overlap(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const Plan& plan) {
  OverlapOutput result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = convolve_overlapped(x, weight, bias, plan->work);
  }
  connect<ConvOverlapBackward>(
      result.output, {x, weight, bias}, x, result.slab, weight, plan);
  return result.output;
}

} // namespace shardtensor::detail
