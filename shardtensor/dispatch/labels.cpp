#include "shardtensor/dispatch/labels.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include <ATen/ExpandUtils.h>

#include "shardtensor/dispatch/nominal_strides.h"

namespace shardtensor {
namespace {

/// Which label each mesh axis cuts, and how.
struct Assignment {
  explicit Assignment(int64_t axes) : placements(axes), label(axes, kPrivate) {}

  std::vector<Placement> placements; // Replicate, or Partial where kept
  std::vector<int64_t> label; // per axis; kPrivate: none
  std::map<int64_t, Partition> partitions; // by label
};

bool has_label(const std::vector<int64_t>& labels, int64_t label) {
  return label != kPrivate && std::ranges::find(labels, label) != labels.end();
}

/// The numbers that would move where operand i didn't keep its layout. A cut
/// along a contracted dim leaves terms, which the ranks add up: that counts
/// against it where the same axes could cut a dim of this one and of the output
/// instead, as they cut it in another operand.
int64_t weight_of(
    size_t i,
    const std::vector<SpecPtr>& operands,
    const std::vector<std::vector<int64_t>>& labels,
    const std::vector<int64_t>& output,
    int64_t output_numel) {
  const auto& own = *operands[i];
  int64_t weight = own.numel();
  for (const auto dim : own.sharded_dims()) {
    const auto contracted = labels[i][dim];
    if (contracted == kPrivate || has_label(output, contracted)) {
      continue;
    }
    const auto& axes = own.axes(dim);
    const auto leaves_none = [&](size_t other, int64_t its_dim) {
      const auto label = labels[other][its_dim];
      return operands[other]->axes(its_dim) == axes &&
          has_label(labels[i], label) && has_label(output, label);
    };
    for (size_t other = 0; other < operands.size(); ++other) {
      if (operands[other] &&
          std::ranges::any_of(
              operands[other]->sharded_dims(),
              [&](int64_t its_dim) { return leaves_none(other, its_dim); })) {
        weight -= own.mesh()->ranks(axes) * output_numel;
        break;
      }
    }
  }
  return weight;
}

int64_t numel_of(const std::vector<int64_t>& sizes) {
  return std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

/// The operands that have a say, strongest first.
std::vector<size_t> by_weight(Call& call, const Labels& labels) {
  std::vector<SpecPtr> operands;
  std::vector<size_t> order;
  for (size_t i = 0; i < call.operands().size(); ++i) {
    const auto& operand = call.operand(i);
    operands.push_back(is_out_argument(call, operand) ? nullptr : operand.spec);
    if (operands.back()) {
      order.push_back(i);
    }
  }
  const auto& sizes = call.output_sizes();
  std::vector<int64_t> weights(operands.size());
  for (const size_t i : order) {
    weights[i] = operands[i]->numel();
    if (!sizes.empty()) {
      const auto& output = labels.outputs[0];
      const auto numel = numel_of(sizes[0]);
      weights[i] = weight_of(i, operands, labels.operands, output, numel);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const auto& left = call.operand(a);
    const auto& right = call.operand(b);
    return left.written != right.written ? left.written
                                         : weights[a] > weights[b];
  });
  return order;
}

void adopt(
    Assignment& assignment,
    const ShardSpec& spec,
    const std::vector<int64_t>& labels) {
  for (const int64_t dim : spec.sharded_dims()) {
    const auto label = labels[dim];
    const auto axes = spec.axes(dim);
    const bool free = std::all_of(axes.begin(), axes.end(), [&](int64_t axis) {
      return assignment.label[axis] == kPrivate;
    });
    if (label == kPrivate || !free || assignment.partitions.count(label)) {
      continue;
    }
    for (const int64_t axis : axes) {
      assignment.label[axis] = label;
    }
    assignment.partitions.emplace(label, spec.partition(dim));
  }
}

/// Operators need a private dim whole. The axes that cut one go to the longest
/// output dim that no axis cuts: each rank keeps its share of the memory.
void spread(
    Assignment& assignment,
    const ShardSpec& spec,
    const std::vector<int64_t>& labels,
    const std::vector<int64_t>& output,
    const std::vector<int64_t>& sizes) {
  for (const int64_t dim : spec.sharded_dims()) {
    const auto& axes = spec.axes(dim);
    const bool free = std::all_of(axes.begin(), axes.end(), [&](int64_t axis) {
      return assignment.label[axis] == kPrivate;
    });
    if (labels[dim] != kPrivate || spec.size(dim) <= 1 || !free) {
      continue;
    }
    std::vector<int64_t> ranks;
    int64_t extent = 1;
    for (const int64_t axis : axes) {
      ranks.push_back(spec.mesh()->ranks(axis));
      extent *= ranks.back();
    }
    int64_t target = kPrivate;
    for (size_t i = 0; i < output.size(); ++i) {
      const bool longer =
          target == kPrivate ? sizes[i] >= extent : sizes[i] > extent;
      if (longer && output[i] != kPrivate &&
          !assignment.partitions.count(output[i])) {
        extent = sizes[i];
        target = output[i];
      }
    }
    if (target != kPrivate) {
      for (const int64_t axis : axes) {
        assignment.label[axis] = target;
      }
      assignment.partitions.emplace(target, Partition::chunked(extent, ranks));
    }
  }
}

bool is_scalar_operand(const Operand& operand) {
  return !operand.spec;
}

/// The reduction that the result may keep on this axis, if any.
std::optional<Reduce> kept_partial(
    const Call& call,
    int64_t axis,
    Linearity linearity) {
  if (linearity == Linearity::None) {
    return {};
  }
  std::optional<Reduce> reduce;
  size_t partials = 0;
  size_t values = 0;
  for (const auto& operand : call.operands()) {
    if (is_out_argument(call, operand)) {
      continue;
    }
    values += 1;
    if (!is_scalar_operand(operand) &&
        operand.spec->placement(axis).is_partial()) {
      const auto found = operand.spec->placement(axis).reduce;
      if (reduce && *reduce != found) {
        return {};
      }
      reduce = found;
      partials += 1;
    }
  }
  if (!reduce || call.operands().empty()) {
    return {};
  }
  const auto& first = call.operand(0);
  const bool first_is_partial =
      !is_scalar_operand(first) && first.spec->placement(axis).is_partial();
  const bool linear_reduce = is_linear_reduce(*reduce);
  switch (linearity) {
    case Linearity::Copy:
      return values == 1 ? reduce : std::nullopt;
    case Linearity::Unary:
      return values == 1 && linear_reduce ? reduce : std::nullopt;
    case Linearity::Additive:
      return partials == values && linear_reduce ? reduce : std::nullopt;
    case Linearity::Product:
      return partials == 1 && linear_reduce ? reduce : std::nullopt;
    case Linearity::First:
      return partials == 1 && first_is_partial && linear_reduce ? reduce
                                                                : std::nullopt;
    case Linearity::None:
      break;
  }
  return {};
}

SpecPtr laid_out(
    const Assignment& assignment,
    const MeshPtr& mesh,
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& labels,
    const std::vector<Placement>& otherwise) {
  auto placements = otherwise;
  ShardSpec::Partitions partitions(sizes.size());
  for (size_t dim = 0; dim < labels.size(); ++dim) {
    const auto found = assignment.partitions.find(labels[dim]);
    if (labels[dim] == kPrivate || found == assignment.partitions.end()) {
      continue;
    }
    for (int64_t axis = 0; axis < mesh->axes(); ++axis) {
      if (assignment.label[axis] == labels[dim]) {
        placements[axis] = Placement::shard(static_cast<int64_t>(dim));
      }
    }
    partitions[dim] = found->second;
  }
  return make_spec(mesh, sizes, std::move(placements), std::move(partitions));
}

/// Where the contraction leaves terms: axes whose label is in no output.
std::vector<Placement> output_placements(
    const Assignment& assignment,
    const std::vector<int64_t>& labels) {
  auto placements = assignment.placements;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const auto label = assignment.label[axis];
    if (label != kPrivate &&
        std::find(labels.begin(), labels.end(), label) == labels.end()) {
      placements[axis] = Placement::partial();
    }
  }
  return placements;
}

/// What an operand is on axes that do not cut it.
std::vector<Placement> input_placements(
    const Assignment& assignment,
    const Operand& operand) {
  std::vector<Placement> placements(assignment.placements.size());
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    const auto own = operand.spec->placement(static_cast<int64_t>(axis));
    if (own.is_partial() && assignment.placements[axis].is_partial()) {
      placements[axis] = own;
    }
  }
  return placements;
}

} // namespace

bool is_out_argument(const Call& call, const Operand& operand) {
  return operand.written &&
      call.op().schema().arguments()[operand.argument].kwarg_only();
}

namespace {

/// Which axis cuts which label, and where terms stay.
Assignment assign_axes(
    Call& call,
    const Labels& labels,
    Linearity linearity,
    std::optional<size_t> addend) {
  Assignment assignment(call.mesh()->axes());
  auto order = by_weight(call, labels);
  std::erase_if(order, [&](size_t i) { return i == addend; });
  for (const size_t i : order) {
    adopt(assignment, *call.operand(i).spec, labels.operands[i]);
  }
  const auto& sizes = call.output_sizes();
  for (const size_t i : order) {
    if (!sizes.empty()) {
      spread(
          assignment,
          *call.operand(i).spec,
          labels.operands[i],
          labels.outputs[0],
          sizes[0]);
    }
  }
  for (int64_t axis = 0; axis < call.mesh()->axes(); ++axis) {
    if (assignment.label[axis] == kPrivate) {
      if (auto reduce = kept_partial(call, axis, linearity)) {
        assignment.placements[axis] = Placement::partial(*reduce);
      }
    }
  }
  return assignment;
}

std::vector<SpecPtr> output_layouts(
    Call& call,
    const Labels& labels,
    const Assignment& assignment) {
  std::vector<SpecPtr> layouts;
  const auto& sizes = call.output_sizes();
  for (size_t i = 0; i < sizes.size(); ++i) {
    layouts.push_back(laid_out(
        assignment,
        call.mesh(),
        sizes[i],
        labels.outputs[i],
        output_placements(assignment, labels.outputs[i])));
  }
  return layouts;
}

std::vector<SpecPtr> input_layouts(
    const Call& call,
    const Labels& labels,
    std::optional<size_t> addend,
    const Assignment& assignment,
    const std::vector<SpecPtr>& outputs) {
  std::vector<SpecPtr> layouts;
  size_t out = 0;
  for (size_t i = 0; i < call.operands().size(); ++i) {
    const auto& operand = call.operand(i);
    if (is_out_argument(call, operand)) {
      layouts.push_back(outputs.at(out++));
    } else if (i == addend) { // of terms it is in one, a number, too
      layouts.push_back(laid_out(
          assignment,
          call.mesh(),
          operand.tensor.sizes().vec(),
          labels.operands[i],
          output_placements(assignment, labels.outputs.at(0))));
    } else if (!operand.spec) {
      layouts.push_back(nullptr);
    } else {
      layouts.push_back(laid_out(
          assignment,
          call.mesh(),
          operand.spec->sizes(),
          labels.operands[i],
          input_placements(assignment, operand)));
    }
  }
  return layouts;
}

} // namespace

Decision rule_by_labels(
    Call& call,
    const Labels& labels,
    Linearity linearity,
    std::optional<size_t> addend) {
  if (auto sizes = sizes_by_labels(call, labels)) {
    call.set_output_sizes(*std::move(sizes));
  }
  const auto assignment = assign_axes(call, labels, linearity, addend);
  Decision decision;
  decision.outputs = output_layouts(call, labels, assignment);
  decision.inputs =
      input_layouts(call, labels, addend, assignment, decision.outputs);
  return decision;
}

ProductLayouts product_layouts(
    const std::vector<SpecPtr>& operands,
    const std::vector<std::vector<int64_t>>& labels,
    const std::vector<int64_t>& output,
    const std::vector<int64_t>& output_sizes) {
  std::vector<size_t> order(operands.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater<>(), [&](size_t i) {
    return weight_of(i, operands, labels, output, numel_of(output_sizes));
  });
  const auto& mesh = operands.front()->mesh();
  Assignment assignment(mesh->axes());
  for (const auto i : order) {
    adopt(assignment, *operands[i], labels[i]);
  }
  ProductLayouts layouts;
  for (size_t i = 0; i < operands.size(); ++i) {
    layouts.operands.push_back(laid_out(
        assignment,
        mesh,
        operands[i]->sizes(),
        labels[i],
        assignment.placements));
  }
  layouts.output = laid_out(
      assignment,
      mesh,
      output_sizes,
      output,
      output_placements(assignment, output));
  return layouts;
}

std::optional<std::vector<std::vector<int64_t>>> sizes_by_labels(
    const Call& call,
    const Labels& labels) {
  std::map<int64_t, int64_t> extents;
  for (size_t i = 0; i < call.operands().size(); ++i) {
    const auto& operand = call.operand(i);
    if (!operand.spec || is_out_argument(call, operand)) {
      continue;
    }
    const auto& own = labels.operands[i];
    if (static_cast<int64_t>(own.size()) != operand.dim()) {
      return {};
    }
    for (size_t dim = 0; dim < own.size(); ++dim) {
      const auto extent = operand.spec->size(static_cast<int64_t>(dim));
      if (own[dim] != kPrivate &&
          extents.emplace(own[dim], extent).first->second != extent) {
        return {};
      }
    }
  }
  std::vector<std::vector<int64_t>> outputs;
  for (const auto& of_output : labels.outputs) {
    auto& sizes = outputs.emplace_back();
    for (const int64_t label : of_output) {
      const auto found = extents.find(label);
      if (found == extents.end()) {
        return {};
      }
      sizes.push_back(found->second);
    }
  }
  return outputs;
}

namespace {

/// The sizes of operands that are broadcast against each other. One that is
/// written in place must have them.
std::vector<int64_t> broadcast_sizes(const Call& call) {
  std::vector<int64_t> sizes;
  for (const auto& operand : call.operands()) {
    if (!is_out_argument(call, operand)) {
      sizes = at::infer_size(sizes, operand.tensor.sizes());
    }
  }
  for (const auto& operand : call.operands()) {
    TORCH_CHECK(
        !operand.written || is_out_argument(call, operand) ||
            operand.tensor.sizes() == sizes,
        call.name(),
        ": output with shape ",
        operand.tensor.sizes(),
        " doesn't match the broadcast shape ",
        at::IntArrayRef(sizes));
  }
  return sizes;
}

} // namespace

std::vector<int64_t> broadcast_to(
    const Operand& operand,
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& labels) {
  std::vector<int64_t> result(operand.dim(), kPrivate);
  const auto shift = static_cast<int64_t>(labels.size()) - operand.dim();
  for (int64_t dim = 0; dim < operand.dim(); ++dim) {
    if (dim + shift >= 0 && operand.spec->size(dim) == sizes[dim + shift]) {
      result[dim] = labels[dim + shift];
    }
  }
  return result;
}

Labels broadcast_labels(Call& call) {
  Labels labels;
  const auto sizes = broadcast_sizes(call);
  const auto outputs = call.op().schema().returns().size();
  call.set_output_sizes(std::vector(outputs, sizes));
  std::vector<int64_t> of_output(sizes.size());
  std::iota(of_output.begin(), of_output.end(), 0);
  for (const auto& operand : call.operands()) {
    labels.operands.push_back(broadcast_to(operand, sizes, of_output));
  }
  labels.outputs.assign(outputs, of_output);
  return labels;
}

Decision elementwise_rule(Call& call, Linearity linearity) {
  auto decision = rule_by_labels(call, broadcast_labels(call), linearity);
  decision.strides_of = detail::strides_of_elements;
  return decision;
}

Decision pointwise_rule(Call& call) {
  return elementwise_rule(call, Linearity::None);
}

Decision replicate_rule(Call& call) {
  Decision decision;
  for (const auto& operand : call.operands()) {
    decision.inputs.push_back(
        operand.spec ? replicated(operand.spec) : nullptr);
  }
  return decision;
}

} // namespace shardtensor
