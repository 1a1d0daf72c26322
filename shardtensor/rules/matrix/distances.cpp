#include <numeric>

#include "shardtensor/dispatch/arguments/refused_dtype.h"
#include "shardtensor/dispatch/labels.h"

// cdist: the distance of every row of one matrix to every row of another. Rows
// may be cut on both sides, what a row holds is whole.

namespace shardtensor::detail {
namespace {

/// The batch, then `rows`, then a whole dim.
std::vector<int64_t> points(int64_t dims, int64_t rows) {
  std::vector<int64_t> labels(dims, kPrivate);
  std::iota(labels.begin(), labels.end() - 2, 0);
  labels[dims - 2] = rows;
  return labels;
}

/// Of distances: the batch, rows of the first, rows of the second.
std::vector<int64_t> pairs(int64_t dims) {
  std::vector<int64_t> labels(dims);
  std::iota(labels.begin(), labels.end(), 0);
  return labels;
}

/// Operands of other numbers of dims, or broadcast ones, are taken whole.
bool is_plain_case(const Call& call) {
  const auto& first = call.operand(0);
  for (const auto& operand : call.operands()) {
    if (!operand.spec || operand.dim() != first.dim() || first.dim() < 2) {
      return false;
    }
    for (int64_t dim = 0; dim < first.dim() - 2; ++dim) {
      if (operand.spec->size(dim) != first.spec->size(dim)) {
        return false;
      }
    }
  }
  return true;
}

Decision gathered(Call& call) {
  auto decision = replicate_rule(call);
  decision.is_repair = true;
  return decision;
}

Decision cdist_rule(Call& call) {
  if (!is_plain_case(call)) {
    return gathered(call);
  }
  check_takes_dtypes(call);
  const auto dims = call.operand(0).dim();
  return rule_by_labels(
      call,
      {{points(dims, dims - 2), points(dims, dims - 1)}, {pairs(dims)}},
      Linearity::None);
}

/// The gradient of a row sums over the rows of the other side: Partial where
/// those are cut.
Decision cdist_backward_rule(Call& call) {
  if (!is_plain_case(call)) {
    return gathered(call);
  }
  const auto dims = call.operand(0).dim();
  const auto first = points(dims, dims - 2);
  call.set_output_sizes({call.operand(1).spec->sizes()});
  return rule_by_labels(
      call,
      {{pairs(dims), first, points(dims, dims - 1), pairs(dims)}, {first}},
      Linearity::None);
}

const RegisterRules distances{
    {"aten::_cdist_forward", cdist_rule},
    {"aten::_euclidean_dist", cdist_rule},
    {"aten::_cdist_backward", cdist_backward_rule},
};

} // namespace
} // namespace shardtensor::detail
