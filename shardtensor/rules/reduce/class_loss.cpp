#include <ATen/TensorOperators.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/cross_entropy_loss_ops.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/nll_loss2d_ops.h>
#include <ATen/ops/nll_loss_nd.h>
#include <ATen/ops/nll_loss_ops.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/layout/reduced_spec.h"
#include "shardtensor/tensor/gradients/tangent.h"

// Losses of log-probabilities against class indices. Every rank computes the
// plain loss of its piece: other ranks' classes are ignored targets. The sum of
// the losses, of their weights and of targets out of range travel together.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// An ignored target of the local calls: ours, because a user's ignore_index
/// may name a class of another rank.
constexpr int64_t kIgnored = -100;

struct ClassLoss {
  const char* op;
  OptionalTensor weight; // plain, one per class
  int64_t reduction;
  int64_t ignore_index;
  double label_smoothing;
};

int64_t class_dim(int64_t dims) {
  return dims == 1 ? 0 : 1;
}

/// The layout of the targets: that of the log-probabilities without classes.
SpecPtr target_spec(const SpecPtr& x, int64_t classes, Placement on_classes) {
  return reduced_spec(x, {classes}, /*keepdim=*/false, on_classes);
}

/// Log-probabilities whose classes, if cut, are cut into one run per rank.
Tensor with_runs_of_classes(const Tensor& x, int64_t classes) {
  const auto& layout = spec(x);
  const bool runs = !layout->is_sharded(classes) ||
      layout->partition(classes).is_contiguous();
  return redistribute(
      x, without_partial(runs ? layout : without_shard(layout, classes)));
}

Tensor local_target(
    const char* op,
    const Tensor& target,
    const SpecPtr& x,
    int64_t classes) {
  const auto wanted = target_spec(x, classes, Placement::replicate());
  const at::IntArrayRef sizes(wanted->sizes());
  if (target.sizes() != sizes) {
    const auto message = c10::str(
        op,
        ": expected a target of sizes ",
        sizes,
        " for an input of sizes ",
        at::IntArrayRef(x->sizes()),
        ", got ",
        target.sizes());
    // As PyTorch: another batch is another kind of error.
    const bool is_batch =
        target.dim() > 0 && !sizes.empty() && target.size(0) != sizes[0];
    TORCH_CHECK_VALUE(!is_batch, message);
    TORCH_CHECK(false, message);
  }
  // The kernel asks only where it has targets.
  const auto dtype = target.scalar_type();
  TORCH_CHECK(
      dtype == at::kLong || dtype == at::kByte,
      op,
      ": expected target dtype to be Long or Byte, but got ",
      dtype);
  // kIgnored is no byte.
  return to_local(redistribute(promote_operand(target, x->mesh(), op), wanted))
      .to(at::kLong);
}

// Of whose arguments autocast makes fp32, in a cross entropy, too.
constexpr auto kLossOp = "aten::nll_loss";

/// The class weights, whole.
OptionalTensor plain_weight(
    const char* op,
    const OptionalTensor& weight,
    const Tensor& x) {
  if (!weight || !weight->defined()) {
    return {};
  }
  const auto classes = x.size(class_dim(x.dim()));
  TORCH_CHECK(
      weight->dim() == 1 && weight->size(0) == classes,
      op,
      ": expected a weight of sizes [",
      classes,
      "], one per class, got ",
      weight->sizes());
  check_promotions({*weight}, op);
  check_no_tangent("class weights of a loss", *weight);
  TORCH_CHECK( // a rank without classes would not call what refuses them
      !(at::GradMode::is_enabled() && weight->requires_grad()),
      op,
      " is not differentiable with respect to argument 'weight'. This input "
      "cannot have requires_grad True.");
  const auto whole = autocast_to_float(
      kLossOp, is_shard_tensor(*weight) ? full_tensor(*weight) : *weight);
  TORCH_CHECK(
      whole.scalar_type() == x.scalar_type(),
      op,
      ": expected a weight of the input's dtype, ",
      x.scalar_type(),
      ", got ",
      whole.scalar_type());
  return whole;
}

/// What the local call works on.
struct Piece {
  Tensor log_probability;
  Tensor target; // kIgnored or an index of this rank's classes
  Tensor ignored; // by the user's ignore_index
  OptionalTensor weight; // of this rank's classes
  int64_t classes; // the dim
};

Tensor unreduced(const Piece& piece, const ClassLoss& loss, int64_t count) {
  const auto dim = piece.classes;
  const auto& x = piece.log_probability;
  // A rank without classes adds nothing, but stays in the graph.
  auto result = x.size(dim) == 0
      ? at::sum(x, at::IntArrayRef{dim})
      : at::nll_loss_nd(
            x, piece.target, piece.weight, at::Reduction::None, kIgnored);
  if (loss.label_smoothing > 0) {
    std::vector<int64_t> sizes(x.dim(), 1);
    sizes[dim] = x.size(dim);
    const auto weighted = piece.weight ? x * piece.weight->view(sizes) : x;
    const auto smooth = at::sum(weighted, at::IntArrayRef{dim})
                            .neg()
                            .masked_fill(piece.ignored, 0);
    result = result * (1 - loss.label_smoothing) +
        smooth * (loss.label_smoothing / static_cast<double>(count));
  }
  return result;
}

/// The sum of the weights of this rank's targets.
Tensor weight_of(const Piece& piece) {
  const auto valid = piece.target.ne(kIgnored);
  if (!piece.weight || piece.weight->numel() == 0) {
    return at::sum(valid);
  }
  const auto weights = piece.weight->detach().index(
      {piece.target.masked_fill(valid.logical_not(), 0)});
  return at::sum(weights.masked_fill(valid.logical_not(), 0));
}

Piece cut_piece(
    const Tensor& x,
    const Tensor& target,
    const ClassLoss& loss,
    const ShardSpec& layout) {
  const auto dim = class_dim(layout.dim());
  Piece piece{x, target, target.eq(loss.ignore_index), loss.weight, dim};
  Interval own{0, layout.size(dim)};
  if (layout.is_sharded(dim)) {
    own = layout.interval(dim);
    if (piece.weight) {
      piece.weight = piece.weight->narrow(0, own.begin, own.extent());
    }
  }
  const auto mine = target.ge(own.begin)
                        .logical_and(target.lt(own.end))
                        .logical_and(piece.ignored.logical_not());
  piece.target = (target - own.begin).masked_fill(mine.logical_not(), kIgnored);
  return piece;
}

/// Sum of the losses, of the weights, number of wrong targets: over all ranks.
std::vector<Tensor> totals(
    const Tensor& loss,
    const Piece& piece,
    const Tensor& wrong,
    const ShardSpec& layout) {
  const auto dtype =
      loss.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  // On one coordinate of axes that cut classes, where all see each target.
  auto wrong_here = at::sum(wrong).to(dtype);
  const auto dim = class_dim(layout.dim());
  if (layout.is_sharded(dim) &&
      layout.piece(dim, layout.mesh()->position()) > 0) {
    wrong_here = wrong_here * 0;
  }
  const auto local =
      at::stack({at::sum(loss, dtype), weight_of(piece).to(dtype), wrong_here});
  auto placements = layout.placements();
  for (auto& placement : placements) {
    if (placement.is_shard()) {
      placement = Placement::partial();
    }
  }
  const auto terms =
      from_local(local, make_spec(layout.mesh(), {3}, placements));
  return full_tensor(terms).unbind(0);
}

void check_targets(const char* op, const Tensor& wrong, int64_t classes) {
  if (is_traced(wrong) || !wrong.is_cpu()) { // a device is not waited for
    const auto text = c10::str(
        op,
        ": targets are out of bounds: expected classes in [0, ",
        classes,
        ") or ignore_index");
    at::_assert_async(wrong.eq(0), text);
    return;
  }
  const auto count = wrong.item<double>();
  TORCH_CHECK_INDEX(
      count == 0,
      op,
      ": ",
      static_cast<int64_t>(count),
      " targets are out of bounds: expected classes in [0, ",
      classes,
      ") or ignore_index");
}

Tensor class_loss(
    const Tensor& input,
    const Tensor& target,
    const ClassLoss& loss) {
  const auto dim = class_dim(input.dim());
  const auto x = with_runs_of_classes(input, dim);
  const auto layout = spec(x);
  const auto count = layout->size(dim);
  const auto labels = local_target(loss.op, target, layout, dim);
  const auto piece = cut_piece(to_local(x), labels, loss, *layout);
  const auto local = unreduced(piece, loss, count);
  const auto wrong = labels.lt(0)
                         .logical_or(labels.ge(count))
                         .logical_and(piece.ignored.logical_not());
  const auto sums = totals(local, piece, wrong, *layout);
  check_targets(loss.op, sums[2], count);
  if (loss.reduction == at::Reduction::None) {
    return from_local(local, target_spec(layout, dim, Placement::partial()));
  }
  const auto value =
      loss.reduction == at::Reduction::Mean ? sums[0] / sums[1] : sums[0];
  return from_local(
      value.to(local.scalar_type()), make_replicated(layout->mesh(), {}));
}

/// The input, on the mesh of the arguments, in the dtype that autocast wants.
Tensor loss_input(
    const char* op,
    const Tensor& input,
    const Tensor& target,
    const OptionalTensor& weight) {
  TORCH_CHECK_VALUE(
      input.dim() > 0,
      op,
      ": expected an input with a dim of classes, got none");
  const auto mesh =
      common_mesh(op, {input, target, value_or_undefined(weight)});
  return autocast_to_float(op, promote_operand(input, mesh, op));
}

Tensor nll_loss_function(
    const Tensor& self,
    const Tensor& target,
    const OptionalTensor& weight,
    int64_t reduction,
    int64_t ignore_index) {
  constexpr auto op = kLossOp;
  const auto x = loss_input(op, self, target, weight);
  TORCH_CHECK_NOT_IMPLEMENTED( // a rank without rows would take any
      x.is_floating_point(),
      op,
      ": not implemented for ",
      x.scalar_type());
  return class_loss(
      x,
      target,
      {op, plain_weight(op, weight, x), reduction, ignore_index, 0.0});
}

Tensor cross_entropy_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    const Tensor& target,
    const OptionalTensor& weight,
    int64_t reduction,
    int64_t ignore_index,
    double label_smoothing) {
  // Probabilities as targets are sums and products: right as PyTorch composes
  // them.
  if (self.sizes() == target.sizes()) {
    return without_rule<at::_ops::cross_entropy_loss>(
        keys, self, target, weight, reduction, ignore_index, label_smoothing);
  }
  constexpr auto op = "aten::cross_entropy_loss";
  TORCH_CHECK(
      label_smoothing >= 0 && label_smoothing <= 1,
      op,
      ": expected a label_smoothing in [0, 1], got ",
      label_smoothing);
  const auto x = loss_input(op, self, target, weight);
  const auto log_probability = autocast_to_float(
      kLossOp, at::log_softmax(x, class_dim(x.dim()), x.scalar_type()));
  return class_loss(
      log_probability,
      target,
      {op,
       plain_weight(op, weight, log_probability),
       reduction,
       ignore_index,
       label_smoothing});
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "nll_loss_nd", function_rule<at::_ops::nll_loss_nd, nll_loss_function>);
  m.impl("nll_loss", function_rule<at::_ops::nll_loss, nll_loss_function>);
  m.impl("nll_loss2d", function_rule<at::_ops::nll_loss2d, nll_loss_function>);
  m.impl(
      "cross_entropy_loss",
      function_rule<at::_ops::cross_entropy_loss, cross_entropy_function>);
}

} // namespace shardtensor::detail
