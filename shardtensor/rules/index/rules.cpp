#include "shardtensor/rules/index/rules.h"

#include <numeric>

#include "shardtensor/dispatch/labels.h"
#include "shardtensor/rules/index/rows.h"

// Reading and writing at index tensors where the indexed dims are whole: the
// other dims, and those of the indices, keep their layout. read.cpp and
// write.cpp do the rest.

namespace shardtensor {

using namespace detail;
namespace {

constexpr int64_t kIndexLabels = 100; // labels of the indices' own dims

std::vector<int64_t> index_labels(int64_t dims) {
  std::vector<int64_t> labels(dims);
  std::iota(labels.begin(), labels.end(), kIndexLabels);
  return labels;
}

/// Which dims of x the index tensors stand for; no masks among them.
struct Indexed {
  std::vector<int64_t> named;
  std::vector<size_t> operands; // the index tensors
  std::vector<int64_t> index_sizes; // of the broadcast indices
  int64_t x_dims;

  Indexed(const Call& call, int64_t x_dims) : x_dims(x_dims) {
    const auto argument = call.argument_index("indices");
    const auto indices = call.argument(argument).toOptionalTensorList();
    for (const auto& given : given_indices(indices)) {
      if (given.dim < x_dims) { // else the meta kernel raises
        named.push_back(given.dim);
      }
    }
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < call.operands().size(); ++i) {
      if (call.operand(i).argument == argument) {
        operands.push_back(i);
        tensors.push_back(call.operand(i).tensor);
      }
    }
    index_sizes = shared_sizes(tensors);
  }

  std::vector<int64_t> result_labels() const {
    auto labels = source_labels();
    std::erase(labels, kPrivate);
    const auto own = index_labels(index_sizes.size());
    labels.insert(
        labels.begin() + index_position(named), own.begin(), own.end());
    return labels;
  }

  std::vector<int64_t> source_labels() const {
    std::vector<int64_t> labels(x_dims);
    std::iota(labels.begin(), labels.end(), 0);
    for (const auto dim : named) {
      labels[dim] = kPrivate;
    }
    return labels;
  }
};

} // namespace

Decision index_rule(Call& call) {
  const auto& x = call.operand(0);
  const Indexed indexed(call, x.dim());
  const auto result = indexed.result_labels();
  const auto own = index_labels(indexed.index_sizes.size());
  Labels labels;
  labels.operands.assign(call.operands().size(), {});
  labels.operands[0] = indexed.source_labels();
  for (const size_t i : indexed.operands) {
    labels.operands[i] =
        broadcast_to(call.operand(i), indexed.index_sizes, own);
  }
  labels.outputs = {result};
  return rule_by_labels(call, labels, Linearity::None);
}

/// Every rank must see every index and value of the rows that it writes.
Decision index_put_rule(Call& call) {
  const auto& x = call.operand(0);
  const Indexed indexed(call, x.dim());
  auto result = indexed.result_labels();
  std::vector<int64_t> sizes(result.size());
  for (size_t i = 0; i < result.size(); ++i) {
    if (result[i] < kIndexLabels) {
      sizes[i] = x.spec->size(result[i]);
    } else {
      sizes[i] = indexed.index_sizes[result[i] - kIndexLabels];
      result[i] = kPrivate;
    }
  }
  Labels labels;
  for (const auto& operand : call.operands()) {
    labels.operands.push_back(std::vector<int64_t>(operand.dim(), kPrivate));
  }
  const auto values = call.operands().size() - 1;
  check_values_fit(call.operand(values).tensor.sizes(), sizes);
  labels.operands[0] = indexed.source_labels();
  if (values > 0 && call.operand(values).dim() > 0) {
    labels.operands[values] = broadcast_to(call.operand(values), sizes, result);
  }
  labels.outputs = {indexed.source_labels()};
  return rule_by_labels(call, labels, Linearity::None);
}

} // namespace shardtensor
