#include <numeric>

#include "shardtensor/rules/families.h"
#include "shardtensor/rules/labels.h"

// Operators that work along one dim, with all others as batch. That dim is made
// whole (its mesh axes move to another dim where there is one), the others keep
// their layout.

namespace shardtensor {
namespace {

/// Labels of tensors that are aligned dim by dim, but for `dim`. A dim whose
/// size differs between them, as gather and scatter allow, is private.
Labels aligned_labels(Call& call, int64_t dim) {
  const auto& outputs = call.output_sizes();
  const auto dims = call.operand(0).dim();
  std::vector<int64_t> shared(dims);
  std::iota(shared.begin(), shared.end(), 0);
  if (dims > 0) {
    shared[dim] = kPrivate;
  }
  for (int64_t i = 0; i < dims; ++i) {
    for (const auto& operand : call.operands()) {
      if (operand.dim() == dims &&
          operand.spec->size(i) != call.operand(0).spec->size(i)) {
        shared[i] = kPrivate;
      }
    }
  }
  auto without_dim = shared;
  if (dims > 0) {
    without_dim.erase(without_dim.begin() + dim);
  }
  Labels labels;
  for (const auto& operand : call.operands()) {
    labels.operands.push_back(
        operand.dim() == dims ? shared
                              : std::vector<int64_t>(operand.dim(), kPrivate));
  }
  for (const auto& sizes : outputs) {
    labels.outputs.push_back(
        static_cast<int64_t>(sizes.size()) == dims ? shared : without_dim);
  }
  return labels;
}

Decision along_dim_rule(Call& call) {
  const auto dims = call.operand(0).dim();
  const auto dim = call.argument("dim").toInt();
  return rule_by_labels(
      call, aligned_labels(call, dim < 0 ? dim + dims : dim), Linearity::None);
}

} // namespace

void add_along_dim_rules(RuleTable& table) {
  for (const char* op : {
           "aten::cumsum",
           "aten::cumsum_",
           "aten::cumprod",
           "aten::cumprod_",
           "aten::_logcumsumexp",
           "aten::logcumsumexp",
           "aten::cummax",
           "aten::cummin",
           "aten::sort",
           "aten::sort.stable",
           "aten::topk",
           "aten::kthvalue",
           "aten::mode",
           "aten::median.dim",
           "aten::nanmedian.dim",
           "aten::gather",
           "aten::scatter.src",
           "aten::scatter.value",
           "aten::scatter.reduce",
           "aten::scatter.value_reduce",
           "aten::scatter_.src",
           "aten::scatter_.value",
           "aten::scatter_.reduce",
           "aten::scatter_.value_reduce",
           "aten::scatter_add",
           "aten::scatter_add_",
           "aten::scatter_reduce.two",
           "aten::scatter_reduce_.two",
           "aten::index_select",
           "aten::index_add",
           "aten::index_add_",
           "aten::index_copy",
           "aten::index_copy_",
           "aten::index_fill.int_Scalar",
           "aten::index_fill_.int_Scalar",
           "aten::index_reduce",
           "aten::index_reduce_",
           "aten::renorm",
       }) {
    table.push_back({op, along_dim_rule});
  }
}

} // namespace shardtensor
