#include <numeric>

#include "shardtensor/rules/families.h"
#include "shardtensor/rules/labels.h"

// Joining keeps every layout but that of the joined dim, which must be whole:
// the ranks' pieces of it do not lie one behind the other.

namespace shardtensor {
namespace {

int64_t wrapped(int64_t dim, int64_t dims) {
  return dim < 0 ? dim + dims : dim;
}

std::vector<int64_t> counted(int64_t dims) {
  std::vector<int64_t> labels(dims);
  std::iota(labels.begin(), labels.end(), 0);
  return labels;
}

/// cat also takes empty 1-d tensors of any dtype, as nothing.
Decision cat_rule(Call& call) {
  const auto dims = static_cast<int64_t>(call.output_sizes()[0].size());
  auto output = counted(dims);
  output[wrapped(call.argument("dim").toInt(), dims)] = kPrivate;
  Labels labels;
  for (const auto& operand : call.operands()) {
    labels.operands.push_back(
        operand.dim() == dims ? output
                              : std::vector<int64_t>(operand.dim(), kPrivate));
  }
  labels.outputs = {output};
  return rule_by_labels(call, labels, Linearity::Additive);
}

Decision stack_rule(Call& call) {
  const auto dims = static_cast<int64_t>(call.output_sizes()[0].size());
  const auto dim = wrapped(call.argument("dim").toInt(), dims);
  auto output = counted(dims - 1);
  Labels labels;
  labels.operands.assign(call.operands().size(), output);
  output.insert(output.begin() + dim, kPrivate);
  labels.outputs = {output};
  for (size_t i = 0; i < call.operands().size(); ++i) {
    if (is_out_argument(call, call.operand(i))) {
      labels.operands[i] = output;
    }
  }
  return rule_by_labels(call, labels, Linearity::Additive);
}

} // namespace

void add_join_rules(RuleTable& table) {
  table.insert(
      table.end(),
      {
          {"aten::cat", cat_rule},
          {"aten::cat.out", cat_rule},
          {"aten::stack", stack_rule},
          {"aten::stack.out", stack_rule},
      });
}

} // namespace shardtensor
