#include <algorithm>
#include <numeric>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ops/_linalg_check_errors.h>
#include <ATen/ops/any.h>
#include <ATen/ops/linalg_lstsq.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/nominal_strides.h"

// Operators on matrices that stand in the last two dims: each matrix is needed
// whole, the dims in front are a batch.

namespace shardtensor::detail {
namespace {

/// Right sides of one column may come without a dim for it: as
/// linalg_solve_is_vector_rhs in ATen/native/LinearAlgebraUtils.h.
bool is_vector(const at::Tensor& right, const at::Tensor& matrix) {
  return right.dim() == 1 ||
      (matrix.dim() - 1 == right.dim() &&
       right.sizes() == matrix.sizes().slice(0, right.dim()));
}

const std::unordered_set<std::string> kWithVectors{
    "aten::_linalg_solve_ex",
    "aten::linalg_lstsq"};

/// A matrix of right sides, whole for all of the batch, that has as many dims
/// as a batch of vectors: pieces of other sizes may be taken for one.
bool has_dims_of_vectors(const Call& call) {
  if (!kWithVectors.count(call.op().operator_name().name)) {
    return false;
  }
  const auto& matrix = call.operand(0).tensor;
  const auto& right = call.operand(1).tensor;
  return right.dim() == matrix.dim() - 1 && !is_vector(right, matrix);
}

/// How many dims of an operand belong to one element of the batch.
int64_t own_dims(const Call& call, const Operand& operand) {
  using Names = std::unordered_set<std::string>;
  static const Names vectors{"LU_pivots", "pivots", "tau"};
  static const Names numbers{"atol", "rtol"};
  const auto& op = call.op().operator_name().name;
  const auto& name = call.op().schema().arguments()[operand.argument].name();
  if (numbers.count(name)) {
    return 0;
  }
  const bool has_one_dim = vectors.count(name) ||
      (op == "aten::ormqr" && name == "input2") ||
      (kWithVectors.count(op) && operand.argument == 1 &&
       is_vector(operand.tensor, call.operand(0).tensor));
  return std::min<int64_t>(operand.dim(), has_one_dim ? 1 : 2);
}

/// Right sides whose columns are solved alone, and the first output, which has
/// the same: the operator's argument with them.
const std::unordered_map<std::string, const char*> kRightSides{
    {"aten::cholesky_solve", "self"},
    {"aten::linalg_ldl_solve", "B"},
    {"aten::linalg_lu_solve", "B"},
    {"aten::linalg_solve_triangular", "B"},
    {"aten::ormqr", "input3"},
    {"aten::triangular_solve", "self"},
};

/// Labels those dims of a right side and of the result that are neither batch
/// nor equations: they may be cut.
void label_columns(const Call& call, int64_t label, Labels& labels) {
  const auto found = kRightSides.find(call.op().operator_name().name);
  if (found == kRightSides.end()) {
    return;
  }
  const auto argument = call.argument_index(found->second);
  const bool left =
      !call.has_argument("left") || call.argument("left").toBool();
  for (size_t i = 0; i < labels.operands.size(); ++i) {
    const auto& operand = call.operand(i);
    const auto from_end = left ? 1 : 2;
    if (operand.argument == argument && own_dims(call, operand) == 2) {
      labels.operands[i].end()[-from_end] = label;
      labels.outputs.at(0).end()[-from_end] = label;
    }
  }
}

/// Whether ranks give up pieces without getting others: a cut of a matrix that
/// no dim of the batch could take.
bool gathers(const Call& call, const Decision& decision) {
  for (size_t i = 0; i < decision.inputs.size(); ++i) {
    const auto& own = call.operand(i).spec;
    const auto& wanted = decision.inputs[i];
    for (int64_t axis = 0; own && wanted && axis < own->mesh()->axes();
         ++axis) {
      if (own->placement(axis).is_shard() &&
          !wanted->placement(axis).is_shard()) {
        return true;
      }
    }
  }
  return false;
}

/// Of the factors of one matrix for a whole batch of right sides.
int64_t batch_dims_of_factors(const Call& call, int64_t batch) {
  return call.op().operator_name().name == "aten::_linalg_solve_ex"
      ? call.operand(0).dim() - own_dims(call, call.operand(0))
      : batch;
}

std::vector<int64_t> column_major(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::swap(order.at(0), order.at(1));
  return dense_strides(order, sizes);
}

/// With the strides that PyTorch gives: most results are column-major, also two
/// of which its Meta kernels say something else. A GPU's eig copies its
/// vectors.
Decision with_strides(Call& call, Decision decision) {
  decision.strides = call.output_strides();
  const auto& op = call.op().operator_name().name;
  const auto& last = call.output_sizes().back();
  const auto& matrix = call.operand(0).tensor;
  const bool is_told_wrongly =
      (op == "aten::linalg_eig" && !matrix.is_cuda()) ||
      (op == "aten::_linalg_svd" && matrix.is_cpu());
  if (is_told_wrongly && last.size() > 1) {
    decision.strides.back() = column_major(last);
  }
  return decision;
}

Decision matrices_rule(Call& call) {
  const bool checks = call.has_argument("check_errors") &&
      call.argument("check_errors").toBool();
  if (checks ||
      (has_dims_of_vectors(call) &&
       call.operand(1).tensor.size(-2) == call.operand(1).tensor.size(-1))) {
    auto decision = replicate_rule(call);
    decision.is_repair = true;
    return with_strides(call, std::move(decision));
  }
  std::vector<int64_t> batch;
  const auto visit = [&](const auto& see) {
    for (const auto& operand : call.operands()) {
      see(operand, operand.dim() - own_dims(call, operand));
    }
  };
  visit([&](const Operand&, int64_t dims) {
    batch.resize(std::max<size_t>(batch.size(), dims), 1);
  });
  const auto count = static_cast<int64_t>(batch.size());
  visit([&](const Operand& operand, int64_t dims) {
    for (int64_t dim = 0; dim < dims; ++dim) {
      auto& extent = batch[count - dims + dim];
      extent = operand.spec->size(dim) == 1 ? extent : operand.spec->size(dim);
    }
  });
  Labels labels;
  visit([&](const Operand& operand, int64_t dims) {
    auto& own = labels.operands.emplace_back(operand.dim(), kPrivate);
    for (int64_t dim = 0; dim < dims; ++dim) {
      const auto label = count - dims + dim;
      own[dim] = operand.spec->size(dim) == batch[label] ? label : kPrivate;
    }
  });
  for (const auto& sizes : call.output_sizes()) {
    const auto skipped =
        labels.outputs.empty() ? 0 : count - batch_dims_of_factors(call, count);
    auto& own = labels.outputs.emplace_back(sizes.size(), kPrivate);
    for (size_t dim = 0; dim < sizes.size() && skipped + dim < batch.size();
         ++dim) {
      const auto label = skipped + static_cast<int64_t>(dim);
      own[dim] = sizes[dim] == batch[label] ? label : kPrivate;
    }
  }
  label_columns(call, count, labels);
  auto decision = rule_by_labels(call, labels, Linearity::None);
  for (auto& output : decision.outputs) { // of what all ranks have: no terms
    output = output ? without_partial(output) : output;
  }
  decision.is_repair = gathers(call, decision);
  return with_strides(call, std::move(decision));
}

/// LU factors are those of the transposed matrix where it is contiguous.
Decision factors_rule(Call& call) {
  auto decision = matrices_rule(call);
  decision.reads_order = true;
  return decision;
}

/// Whether there are residuals depends on all matrices of the batch.
bool needs_batch(const Call& call) {
  if (call.op().operator_name().name != "aten::linalg_lstsq" ||
      call.argument("driver").isNone()) {
    return false;
  }
  const auto driver = call.argument("driver").toStringView();
  return driver == "gelsd" || driver == "gelss";
}

/// PyTorch has no Meta kernel of it, and cuBLAS refuses zeros: asks the host.
void infer_least_squares(Call& call) {
  const auto zeros = [&](size_t operand) {
    return at::zeros(call.operand(operand).tensor.sizes(), at::kDouble);
  };
  const auto [solution, residuals, rank, singular_values] =
      at::linalg_lstsq(zeros(0), zeros(1), std::nullopt, "gels");
  call.set_output_sizes(
      {solution.sizes().vec(),
       residuals.sizes().vec(),
       rank.sizes().vec(),
       singular_values.sizes().vec()});
  call.set_output_strides(
      {solution.strides().vec(),
       residuals.strides().vec(),
       rank.strides().vec(),
       singular_values.strides().vec()});
}

/// Of operators that raise for a matrix that they cannot take.
Decision raising_rule(Call& call) {
  if (call.op().operator_name().name == "aten::linalg_lstsq" &&
      call.operand(0).tensor.is_cuda()) {
    infer_least_squares(call);
  }
  if (needs_batch(call)) {
    auto whole = replicate_rule(call);
    whole.is_repair = true;
    // Values say which others there are.
    whole.strides = {call.output_strides().at(0)};
    return whole;
  }
  auto decision = matrices_rule(call);
  for (const auto& output : decision.outputs) {
    if (output && output->is_sharded()) {
      decision.refuses_values = output;
      decision.refuses_on_devices = true;
    }
  }
  return decision;
}

const RegisterRules of_matrices{
    matrices_rule,
    {
        "aten::cholesky_inverse",
        "aten::cholesky_solve",
        "aten::geqrf",
        "aten::linalg_cholesky_ex",
        "aten::linalg_householder_product",
        "aten::linalg_inv_ex",
        "aten::linalg_ldl_factor_ex",
        "aten::linalg_ldl_solve",
        "aten::linalg_lu",
        "aten::linalg_lu_factor_ex",
        "aten::linalg_lu_solve",
        "aten::linalg_matrix_exp",
        "aten::linalg_qr",
        "aten::linalg_solve_triangular",
        "aten::lu_unpack",
        "aten::ormqr",
        "aten::triangular_solve",
    }};

const RegisterRules of_matrices_with_factors{
    factors_rule,
    {
        "aten::_linalg_det",
        "aten::_linalg_slogdet",
        "aten::_linalg_solve_ex",
    }};

const RegisterRules of_matrices_that_raise{
    raising_rule,
    {
        "aten::_linalg_eigh",
        "aten::_linalg_eigvals",
        "aten::_linalg_svd",
        "aten::cholesky",
        "aten::linalg_eig",
        "aten::linalg_lstsq",
        "aten::linalg_pinv.atol_rtol_tensor",
    }};

/// All ranks raise, or none. Communication: one all-reduce of a number; for a
/// compiler, which cannot follow it, all numbers are gathered at once.
void check_errors_kernel(
    const at::Tensor& info,
    std::string_view api_name,
    bool is_matrix) {
  if (has_no_values(local_of(info).tensor) || at::any(info).item<bool>()) {
    at::_linalg_check_errors(
        local_of(info, replicated(spec(info))).tensor, api_name, is_matrix);
  }
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("_linalg_check_errors", check_errors_kernel);
}

} // namespace shardtensor::detail
