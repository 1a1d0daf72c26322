#include "shardtensor/dispatch/along_dim.h"

#include <numeric>
#include <vector>

#include "shardtensor/dispatch/labels.h"

namespace shardtensor::detail {
namespace {

std::vector<int64_t> private_dims(size_t count) {
  return std::vector<int64_t>(count, kPrivate);
}

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
        operand.dim() == dims ? shared : private_dims(operand.dim()));
  }
  for (const auto& sizes : outputs) {
    labels.outputs.push_back(
        sizes.size() == shared.size()            ? shared
            : sizes.size() == without_dim.size() ? without_dim
                                                 : private_dims(sizes.size()));
  }
  return labels;
}

} // namespace

Decision along_dim_rule(Call& call) {
  const auto dims = call.operand(0).dim();
  const auto dim = call.argument("dim").toInt();
  return rule_by_labels(
      call, aligned_labels(call, dim < 0 ? dim + dims : dim), Linearity::None);
}

} // namespace shardtensor::detail
