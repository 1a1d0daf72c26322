#include "shardtensor/rules/attention/attention.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/rules/attention/work_op.h"
#include "shardtensor/tensor/gradients/saved_inputs_node.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using LayoutsPtr = std::shared_ptr<const AttentionLayouts>;

/// Local work: no history, no casts.
struct LocalWork {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/// The local tensor as (batch, heads, rows, features).
Tensor in_four_dims(const Tensor& local) {
  auto sizes = local.sizes().vec();
  while (sizes.size() < 4) {
    sizes.insert(sizes.begin(), 1);
  }
  while (sizes.size() > 4) {
    sizes[1] *= sizes[0];
    sizes.erase(sizes.begin());
  }
  return local.reshape(sizes);
}

Tensor local_part(const Tensor& tensor) {
  return tensor.defined() ? in_four_dims(impl_of(tensor)->local()) : tensor;
}

/// A mask of more than 4 dims may broadcast in some of those that become one.
Tensor local_mask(const Tensor& mask, const ShardSpec& query) {
  if (!mask.defined() || mask.dim() <= 4) {
    return local_part(mask);
  }
  auto sizes = impl_of(mask)->local().sizes().vec();
  for (size_t dim = 0; dim + 3 < sizes.size(); ++dim) {
    sizes[dim] = query.local_sizes()[dim];
  }
  return in_four_dims(impl_of(mask)->local().expand(sizes));
}

AttentionWork with_options(
    AttentionWork work,
    double scale,
    const AttentionDropout& dropout) {
  work.scale = scale;
  work.dropout = dropout;
  return work;
}

/// With a key that is drawn now, where anything is dropped.
AttentionDropout draw_dropout(
    double probability,
    const AttentionOperands& operands) {
  AttentionDropout dropout;
  if (probability > 0) {
    const auto& query = operands.query;
    const auto& own = *spec(query);
    dropout.probability = probability;
    dropout.key = draw_key(impl_of(query)->local(), std::nullopt);
    dropout.heads = global_index(own, own.dim() - 2);
    dropout.queries = query.size(-2);
    dropout.keys = operands.key.size(-2);
  }
  return dropout;
}

/// A ShardTensor in the layout of its operand, of local terms.
Tensor gradient(
    const Tensor& local,
    const SpecPtr& terms,
    const SpecPtr& layout) {
  return redistribute(
      wrap(local.reshape(layout->local_sizes()), terms), layout);
}

/// Rows where broadcast dims of a mask were expanded are summed.
Tensor mask_gradient(const Tensor& local, const AttentionLayouts& layouts) {
  const auto& sizes = layouts.mask->local_sizes();
  auto whole = sizes;
  if (sizes.size() > 4) {
    for (size_t dim = 0; dim + 3 < sizes.size(); ++dim) {
      whole[dim] = layouts.query->local_sizes()[dim];
    }
  }
  return gradient(
      local.reshape(whole).sum_to_size(sizes),
      layouts.mask_terms,
      layouts.mask);
}

struct AttentionBackward : SavedInputsNode {
  /// `output`, `log_sum` and `hidden` are local.
  AttentionBackward(
      const AttentionOperands& operands,
      const Tensor& output,
      const Tensor& log_sum,
      const HiddenRows& hidden,
      LayoutsPtr layouts,
      double scale,
      AttentionDropout dropout)
      : SavedInputsNode(
            {operands.query,
             operands.key,
             operands.value,
             operands.mask,
             output,
             log_sum,
             dropout.key,
             hidden.origin,
             hidden.queries}),
        scope_(current_comm_scope()),
        layouts_(std::move(layouts)),
        scale_(scale),
        dropout_(std::move(dropout)) {
    dropout_.key = Tensor(); // is saved
  }

  std::string name() const override {
    return "ShardTensorAttentionBackward";
  }
  variable_list gradients(
      const Tensor& given,
      const variable_list& inputs,
      bool differentiable) override {
    const CommScope scope(backward_of(scope_));
    const AttentionOperands operands{
        inputs[0], inputs[1], inputs[2], inputs[3]};
    const bool wants_mask = operands.mask.defined() && wants(3);
    const auto grad = tangent_as(given, layouts_->output);
    auto dropout = dropout_;
    dropout.key = inputs[6];
    const auto result = differentiable
        ? attention_gradients_by_scores(
              grad,
              operands,
              wants_mask,
              layouts_->work.causal,
              scale_,
              dropout)
        : by_blocks(
              grad,
              operands,
              {in_four_dims(inputs[4]), inputs[5]},
              {inputs[7], inputs[8]},
              wants_mask,
              with_options(layouts_->work, scale_, dropout));
    return {result.query, result.key, result.value, result.mask};
  }

  AttentionOperands by_blocks(
      const Tensor& grad,
      const AttentionOperands& operands,
      const Attended& attended,
      const HiddenRows& hidden,
      bool wants_mask,
      const AttentionWork& work) {
    const auto& all = *layouts_;
    AttentionGradients local;
    {
      const LocalWork local_work;
      const auto query = local_part(operands.query);
      const auto backward =
          is_traced(query) ? backward_as_operator : attend_all_backward;
      local = backward(
          {query, attended, local_part(grad)},
          {local_part(operands.key), local_part(operands.value)},
          {local_mask(operands.mask, *all.query), hidden},
          wants_mask,
          work);
    }
    return {
        gradient(local.query, all.query_terms, all.query),
        gradient(local.key, all.key_terms, all.key),
        gradient(local.value, all.value_terms, all.value),
        wants_mask ? mask_gradient(local.mask, all) : Tensor()};
  }

  std::string scope_;
  LayoutsPtr layouts_;
  double scale_;
  AttentionDropout dropout_;
};

} // namespace

Tensor attention(
    const AttentionOperands& operands,
    const LayoutsPtr& layouts,
    double scale,
    double dropout_probability,
    at::IntArrayRef strides) {
  const auto& [query, key, value, mask] = operands;
  const auto dropout = draw_dropout(dropout_probability, operands);
  if (has_tangent({query, key, value, mask})) {
    return redistribute(
        attention_by_scores(operands, layouts->work.causal, scale, dropout),
        layouts->output);
  }
  Attended all;
  Mask seen;
  {
    const LocalWork local_work;
    const auto local = local_part(query);
    const bool traced = is_traced(local);
    seen.added = local_mask(mask, *layouts->query);
    if (!traced) { // else the operator looks itself
      seen.hidden = hidden_rows(seen.added, local);
    }
    all = (traced ? attend_as_operator : attend_all)(
        local,
        {local_part(key), local_part(value)},
        seen,
        with_options(layouts->work, scale, dropout));
    all.output = all.output.reshape(layouts->output->local_sizes());
  }
  const auto output = wrap(all.output, layouts->output, strides);
  connect<AttentionBackward>(
      output,
      {query, key, value, mask},
      operands,
      to_local(output.detach()), // shares its version
      all.log_sum,
      seen.hidden,
      layouts,
      scale,
      dropout);
  return output;
}

} // namespace shardtensor::detail
