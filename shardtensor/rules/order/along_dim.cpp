#include <algorithm>
#include <numeric>
#include <string>

#include <ATen/WrapDimUtils.h>
#include <torch/library.h>

#include "shardtensor/dispatch/index_bounds.h"
#include "shardtensor/dispatch/labels.h"

// Operators that work along one dim, with all others as batch. That dim is made
// whole (its mesh axes move to another dim where there is one), the others keep
// their layout.

namespace shardtensor::detail {
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

/// Scans and sorts: the outputs have the sizes of the input.
Decision same_sizes_rule(Call& call) {
  const auto& self = call.operand(0).tensor;
  at::maybe_wrap_dim(call.argument("dim").toInt(), self.dim());
  call.set_output_sizes(
      std::vector(call.op().schema().returns().size(), self.sizes().vec()));
  return along_dim_rule(call);
}

// ---- indices ----------------------------------------------------------------

/// gather and scatter. See Note [Indices out of bounds].
void by_index_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto base = stack->size() - schema.arguments().size();
  const auto argument = [&](const char* name) -> const c10::IValue& {
    return stack->at(base + *schema.argumentIndexWithName(name));
  };
  const auto& self = argument("self").toTensor();
  const auto dims = std::max<int64_t>(self.dim(), 1);
  const auto dim = at::maybe_wrap_dim(argument("dim").toInt(), dims);
  check_index(
      c10::toString(op.operator_name()),
      argument("index").toTensor(),
      dim,
      self.dim() > 0 ? self.size(dim) : 1);
  run_rule(op, along_dim_rule, stack);
}

/// PyTorch's own check sees the sizes of one rank.
Decision index_add_rule(Call& call) {
  const auto& self = call.operand(0).tensor;
  const auto& source = call.argument("source").toTensor();
  auto expected = self.sizes().vec();
  if (self.dim() > 0 && self.dim() == source.dim()) {
    const auto dim =
        at::maybe_wrap_dim(call.argument("dim").toInt(), self.dim());
    expected[dim] = source.size(dim);
  }
  TORCH_CHECK(
      self.dim() < 2 || source.sizes() == expected,
      call.name(),
      ": source tensor shape must match self tensor shape, excluding the "
      "specified dimension, got self of sizes ",
      self.sizes(),
      ", source of sizes ",
      source.sizes());
  return along_dim_rule(call);
}

/// renorm scales each row of `dim` by its norm over all other dims.
Decision renorm_rule(Call& call) {
  const auto dims = call.operand(0).dim();
  const auto dim = call.argument("dim").toInt();
  std::vector<int64_t> own(dims, kPrivate);
  own.at(at::maybe_wrap_dim(dim, dims)) = 0;
  call.set_output_sizes({call.operand(0).spec->sizes()});
  return rule_by_labels(call, {{own}, {own}}, Linearity::None);
}

// ---- looking values up ------------------------------------------------------

std::vector<int64_t> numbered(int64_t dims) {
  std::vector<int64_t> labels(dims);
  std::iota(labels.begin(), labels.end(), 0);
  return labels;
}

/// The last dim of the sorted sequence is whole; every value is looked up
/// alone.
Decision searchsorted_rule(Call& call) {
  const auto value = call.operands().size() > 1 && call.operand(1).argument == 1
      ? call.operand(1).dim()
      : 0;
  Labels labels;
  for (const auto& operand : call.operands()) {
    auto own = numbered(operand.dim());
    if (operand.argument != 1) {
      // A sequence of one dim serves all values.
      if (operand.dim() == 1) {
        own[0] = kPrivate;
      } else if (!own.empty()) {
        own.back() = kPrivate;
      }
    }
    labels.operands.push_back(std::move(own));
  }
  labels.outputs = {numbered(value)};
  return rule_by_labels(call, labels, Linearity::None);
}

/// bucketize, isin: the first operand pointwise, the second whole.
Decision lookup_rule(Call& call) {
  Labels labels;
  for (const auto& operand : call.operands()) {
    labels.operands.push_back(
        operand.argument == 0 ? numbered(operand.dim())
                              : std::vector<int64_t>(operand.dim(), kPrivate));
  }
  labels.outputs = {
      numbered(static_cast<int64_t>(call.output_sizes().at(0).size()))};
  return rule_by_labels(call, labels, Linearity::None);
}

const RegisterRules scans_and_sorts{
    same_sizes_rule,
    {
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
    }};
const RegisterRules along_one_dim{
    along_dim_rule,
    {
        "aten::topk",
        "aten::kthvalue",
        "aten::mode",
        "aten::median.dim",
        "aten::nanmedian.dim",
        "aten::index_select",
        "aten::index_copy",
        "aten::index_copy_",
        "aten::index_fill.int_Scalar",
        "aten::index_fill_.int_Scalar",
        "aten::index_reduce",
        "aten::index_reduce_",
        "aten::linalg_cross",
    }};
const RegisterRules additions{
    index_add_rule,
    {
        "aten::index_add",
        "aten::index_add_",
    }};
const RegisterRules renorms{
    renorm_rule,
    {
        "aten::renorm",
        "aten::renorm_",
    }};
const RegisterRules searches{
    searchsorted_rule,
    {
        "aten::searchsorted.Tensor",
        "aten::searchsorted.Scalar",
    }};
const RegisterRules lookups{
    lookup_rule,
    {
        "aten::bucketize.Tensor",
        "aten::isin.Tensor_Tensor",
    }};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  for (const char* op :
       {"gather",
        "scatter.src",
        "scatter.value",
        "scatter.reduce",
        "scatter.value_reduce",
        "scatter_.src",
        "scatter_.value",
        "scatter_.reduce",
        "scatter_.value_reduce",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce.two",
        "scatter_reduce_.two"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&by_index_kernel>());
  }
}

} // namespace shardtensor::detail
