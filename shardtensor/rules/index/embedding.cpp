#include <algorithm>
#include <numeric>

#include <ATen/ops/_embedding_bag_backward_ops.h>
#include <ATen/ops/embedding_sparse_backward.h>
#include <ATen/ops/embedding_sparse_backward_ops.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/rules/index/rows.h"

// Rows of a table that indices name. The table's rows are whole, its columns
// and the indices keep their layout.

namespace shardtensor::detail {
namespace {

constexpr int64_t kColumn = 0;

std::vector<int64_t> labels_of_indices(int64_t dims) {
  std::vector<int64_t> labels(dims);
  std::iota(labels.begin(), labels.end(), kColumn + 1);
  return labels;
}

std::vector<int64_t> with_column(std::vector<int64_t> labels) {
  labels.push_back(kColumn);
  return labels;
}

Decision embedding_rule(Call& call) {
  const auto indices = labels_of_indices(call.operand(1).dim());
  return rule_by_labels(
      call,
      {{{kPrivate, kColumn}, indices}, {with_column(indices)}},
      Linearity::None);
}

at::Tensor embedding_kernel(
    const at::Tensor& weight,
    const at::Tensor& indices,
    c10::SymInt padding_idx,
    bool scale_grad_by_freq,
    bool sparse) {
  TORCH_CHECK(weight.dim() == 2, "'weight' must be 2-D, got ", weight.dim());
  if (is_cut(indices) || is_cut(weight)) {
    // See Note [Indices out of bounds]: where the table's rows are cut, the
    // indices are, instead, and a piece without columns looks at none.
    check_index("aten::embedding", indices, 0, weight.size(0));
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::embedding", "");
  torch::jit::Stack stack{
      weight, indices, padding_idx.expect_int(), scale_grad_by_freq, sparse};
  run_rule(op, embedding_rule, &stack);
  return stack.back().toTensor();
}

/// Where CUDA's kernel would read what is not there.
bool has_piece_without_columns(const Operand& grad) {
  const auto column = grad.dim() - 1;
  return grad.tensor.is_cuda() && grad.spec && grad.spec->is_sharded(column) &&
      std::ranges::min(grad.spec->partition(column).local_extents()) == 0;
}

/// Each rank's rows are terms of the whole table's gradient, unless they are
/// weighed by how often they occur on all ranks.
Decision embedding_backward_rule(Call& call) {
  auto indices = labels_of_indices(call.operand(1).dim());
  if (call.argument("scale_grad_by_freq").toBool()) {
    std::fill(indices.begin(), indices.end(), kPrivate);
  }
  auto grad = with_column(indices);
  std::vector<int64_t> table{kPrivate, kColumn};
  if (has_piece_without_columns(call.operand(0))) {
    grad.back() = table.back() = kPrivate;
  }
  return rule_by_labels(call, {{grad, indices}, {table}}, Linearity::None);
}

at::Tensor rows_on_all_ranks(const at::Tensor& x) {
  return is_shard_tensor(x) ? full_tensor(x) : x;
}

/// The rows of all ranks, as a plain tensor: a sparse one has no pieces.
at::Tensor embedding_sparse_backward_function(
    const at::Tensor& grad,
    const at::Tensor& indices,
    int64_t rows,
    int64_t padding_idx,
    bool scale_grad_by_freq) {
  return at::embedding_sparse_backward(
      rows_on_all_ranks(grad),
      rows_on_all_ranks(indices),
      rows,
      padding_idx,
      scale_grad_by_freq);
}

at::Tensor embedding_bag_backward_function(
    c10::DispatchKeySet keys,
    const at::Tensor& grad,
    const at::Tensor& indices,
    const at::Tensor& offsets,
    const at::Tensor& offset2bag,
    const at::Tensor& bag_size,
    const at::Tensor& maximum_indices,
    int64_t rows,
    bool scale_grad_by_freq,
    int64_t mode,
    bool sparse,
    const std::optional<at::Tensor>& weights,
    int64_t padding_idx) {
  using Op = at::_ops::_embedding_bag_backward;
  if (!sparse) {
    return without_rule<Op>(
        keys,
        grad,
        indices,
        offsets,
        offset2bag,
        bag_size,
        maximum_indices,
        rows,
        scale_grad_by_freq,
        mode,
        sparse,
        weights,
        padding_idx);
  }
  return Op::call(
      rows_on_all_ranks(grad),
      rows_on_all_ranks(indices),
      rows_on_all_ranks(offsets),
      rows_on_all_ranks(offset2bag),
      rows_on_all_ranks(bag_size),
      rows_on_all_ranks(maximum_indices),
      rows,
      scale_grad_by_freq,
      mode,
      sparse,
      weights ? std::optional(rows_on_all_ranks(*weights)) : weights,
      padding_idx);
}

const RegisterRules embeddings{
    {"aten::embedding_dense_backward", embedding_backward_rule},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("embedding", embedding_kernel);
}
TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "embedding_sparse_backward",
      function_rule<
          at::_ops::embedding_sparse_backward,
          embedding_sparse_backward_function>);
  m.impl(
      "_embedding_bag_backward",
      function_rule<
          at::_ops::_embedding_bag_backward,
          embedding_bag_backward_function>);
}

} // namespace shardtensor::detail
