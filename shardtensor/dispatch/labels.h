#pragma once

#include <optional>
#include <vector>

#include "shardtensor/dispatch/rule.h"

namespace shardtensor {

/// How the dims of a call's operands and outputs hang together, as in einsum:
/// dims with the same label run over the same index and are sharded alike.
/// kPrivate marks a dim that an operator needs whole (or a broadcast dim of
/// size 1): it is never sharded.
///
/// Example: mm(a, b) has operands {{0, 1}, {1, 2}} and the output {{0, 2}}.
/// Label 1 is in no output: if it is sharded, the output is Partial(sum).
struct Labels {
  std::vector<std::vector<int64_t>> operands;
  std::vector<std::vector<int64_t>> outputs;
};
constexpr int64_t kPrivate = -1;

/// When an operand that is Partial(sum) may stay so.
enum class Linearity {
  None, // never
  Copy, // one operand whose value is only copied: every reduction may stay
  Unary, // linear in its only operand
  Additive, // a sum of its operands: all of them Partial, or none
  Product, // linear in each operand: at most one of them Partial
  First, // linear in the first operand
};

/// The general rule. The largest operands keep their layout, the others follow
/// (an in-place operand always keeps its own); ties go to the first. A cut
/// along a contracted dim counts for less, by the terms it leaves on all ranks,
/// where another operand's cut leaves none. Partial operands are reduced unless
/// `linearity` lets them stay. `addend`, an operand that is added to a
/// contraction, is made Partial where the contraction is.
Decision rule_by_labels(
    Call& call,
    const Labels& labels,
    Linearity linearity,
    std::optional<size_t> addend = {});

/// Where ranks multiply pieces of tensors laid out as `operands`, none Partial,
/// by themselves: the same rule's layouts.
struct ProductLayouts {
  std::vector<SpecPtr> operands;
  SpecPtr output;
};
ProductLayouts product_layouts(
    const std::vector<SpecPtr>& operands,
    const std::vector<std::vector<int64_t>>& labels,
    const std::vector<int64_t>& output,
    const std::vector<int64_t>& output_sizes);

/// The sizes of the outputs, where operands have dims of every label and agree
/// on its extent.
std::optional<std::vector<std::vector<int64_t>>> sizes_by_labels(
    const Call& call,
    const Labels& labels);

/// The labels of an operand that is broadcast to a tensor of `sizes` and
/// `labels`: aligned at the last dims, expanded dims private.
std::vector<int64_t> broadcast_to(
    const Operand& operand,
    const std::vector<int64_t>& sizes,
    const std::vector<int64_t>& labels);

/// Labels of broadcasting: output dim i is label i, operands are aligned at
/// their last dims.
Labels broadcast_labels(Call& call);

/// Output element i depends on the elements i of the inputs (broadcast).
Decision elementwise_rule(Call& call, Linearity linearity);

/// The same, and no Partial may stay. For operators of other libraries, too:
/// see register_rule.
Decision pointwise_rule(Call& call);

/// Every rank works on the whole tensors.
Decision replicate_rule(Call& call);

/// True for the out= arguments of an operator.
bool is_out_argument(const Call& call, const Operand& operand);

} // namespace shardtensor
