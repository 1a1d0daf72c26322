#include <algorithm>
#include <numeric>

#include <torch/library.h>

#include "shardtensor/dispatch/index_bounds.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/rules/index/rules.h"

// Reading and writing at index tensors where the indexed dims are whole: the
// other dims, and those of the indices, keep their layout. read.cpp and
// write.cpp do the rest.

namespace shardtensor {

using namespace detail;
namespace {

constexpr int64_t kIndexLabels = 100; // labels of the indices' own dims

// ---- embedding --------------------------------------------------------------

std::vector<int64_t> index_labels(int64_t dims) {
  std::vector<int64_t> labels(dims);
  std::iota(labels.begin(), labels.end(), kIndexLabels);
  return labels;
}

std::vector<int64_t> with_column(std::vector<int64_t> labels) {
  labels.push_back(0);
  return labels;
}

Decision embedding_rule(Call& call) {
  const auto indices = index_labels(call.operand(1).dim());
  return rule_by_labels(
      call,
      {{{kPrivate, 0}, indices}, {with_column(indices)}},
      Linearity::None);
}

at::Tensor embedding_kernel(
    const at::Tensor& weight,
    const at::Tensor& indices,
    c10::SymInt padding_idx,
    bool scale_grad_by_freq,
    bool sparse) {
  TORCH_CHECK(weight.dim() == 2, "'weight' must be 2-D, got ", weight.dim());
  if (is_shard_tensor(indices) && spec(indices)->is_sharded()) {
    // See Note [Indices out of bounds].
    check_index("aten::embedding", indices, 0, weight.size(0));
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::embedding", "");
  torch::jit::Stack stack{
      weight, indices, padding_idx.expect_int(), scale_grad_by_freq, sparse};
  run_rule(op, embedding_rule, &stack);
  return stack.back().toTensor();
}

/// Each rank's rows are terms of the whole table's gradient, unless they are
/// weighed by how often they occur on all ranks.
Decision embedding_backward_rule(Call& call) {
  auto indices = index_labels(call.operand(1).dim());
  if (call.argument("scale_grad_by_freq").toBool()) {
    std::fill(indices.begin(), indices.end(), kPrivate);
  }
  return rule_by_labels(
      call,
      {{with_column(indices), indices}, {{kPrivate, 0}}},
      Linearity::None);
}

// ---- x[i, :, j] -------------------------------------------------------------

/// Which dims of x the index tensors stand for; no masks among them.
struct Indexed {
  std::vector<bool> dims; // by dim of x
  std::vector<size_t> operands; // the index tensors
  int64_t index_dims = 0; // of the broadcast indices

  Indexed(const Call& call, int64_t x_dims) : dims(x_dims, false) {
    const auto argument = call.argument_index("indices");
    const auto list = call.argument(argument).toOptionalTensorList();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::optional<at::Tensor> index = list.get(i);
      if (index && index->defined()) {
        if (i < dims.size()) {
          dims[i] = true;
        }
      }
    }
    for (size_t i = 0; i < call.operands().size(); ++i) {
      if (call.operand(i).argument == argument) {
        operands.push_back(i);
        index_dims = std::max(index_dims, call.operand(i).dim());
      }
    }
  }

  /// The indices' dims stand where the indexed dims stood when those are
  /// neighbours, else in front.
  std::vector<int64_t> result_labels() const {
    const auto first = std::find(dims.begin(), dims.end(), true);
    const auto last = std::find(dims.rbegin(), dims.rend(), true).base();
    const bool neighbours = std::all_of(first, last, [](bool b) { return b; });
    auto at = neighbours ? first - dims.begin() : 0;
    std::vector<int64_t> labels;
    for (size_t dim = 0; dim <= dims.size(); ++dim) {
      if (static_cast<int64_t>(dim) == at) {
        const auto own = index_labels(index_dims);
        labels.insert(labels.end(), own.begin(), own.end());
      }
      if (dim < dims.size() && !dims[dim]) {
        labels.push_back(static_cast<int64_t>(dim));
      }
    }
    return labels;
  }

  std::vector<int64_t> source_labels() const {
    std::vector<int64_t> labels(dims.size(), kPrivate);
    for (size_t dim = 0; dim < dims.size(); ++dim) {
      if (!dims[dim]) {
        labels[dim] = static_cast<int64_t>(dim);
      }
    }
    return labels;
  }
};

} // namespace

Decision index_rule(Call& call) {
  const auto& x = call.operand(0);
  const Indexed indexed(call, x.dim());
  const auto result = indexed.result_labels();
  const auto& sizes = call.output_sizes()[0];
  const auto own = index_labels(indexed.index_dims);
  std::vector<int64_t> own_sizes(own.size());
  for (size_t i = 0; i < result.size(); ++i) {
    if (result[i] >= kIndexLabels) {
      own_sizes[result[i] - kIndexLabels] = sizes[i];
    }
  }
  Labels labels;
  labels.operands.assign(call.operands().size(), {});
  labels.operands[0] = indexed.source_labels();
  for (const size_t i : indexed.operands) {
    labels.operands[i] = broadcast_to(call.operand(i), own_sizes, own);
  }
  labels.outputs = {result};
  return rule_by_labels(call, labels, Linearity::None);
}

/// Every rank must see every index and value of the rows that it writes.
Decision index_put_rule(Call& call) {
  const auto& x = call.operand(0);
  const Indexed indexed(call, x.dim());
  auto result = indexed.result_labels();
  std::vector<int64_t> sizes(result.size(), 1);
  for (size_t i = 0; i < result.size(); ++i) {
    if (result[i] < kIndexLabels) {
      sizes[i] = x.spec->size(result[i]);
    } else {
      result[i] = kPrivate;
    }
  }
  Labels labels;
  for (const auto& operand : call.operands()) {
    labels.operands.push_back(std::vector<int64_t>(operand.dim(), kPrivate));
  }
  const auto values = call.operands().size() - 1;
  labels.operands[0] = indexed.source_labels();
  if (values > 0 && call.operand(values).dim() > 0) {
    labels.operands[values] = broadcast_to(call.operand(values), sizes, result);
  }
  labels.outputs = {indexed.source_labels()};
  return rule_by_labels(call, labels, Linearity::None);
}

namespace {

const RegisterRules embeddings{
    {"aten::embedding_dense_backward", embedding_backward_rule},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("embedding", embedding_kernel);
}

} // namespace shardtensor
