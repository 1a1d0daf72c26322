#include <numeric>

#include <ATen/Context.h>
#include <ATen/WrapDimUtils.h>

#include "shardtensor/dispatch/along_dim.h"
#include "shardtensor/dispatch/arguments/refused_dtype.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/nominal_strides.h"

// Operators that work along one dim, with all others as batch. That dim is made
// whole (its mesh axes move to another dim where there is one), the others keep
// their layout.

namespace shardtensor::detail {
namespace {

Decision same_sizes_rule(Call& call) {
  const auto& self = call.operand(0).tensor;
  at::maybe_wrap_dim(call.argument("dim").toInt(), self.dim());
  call.set_output_sizes(
      std::vector(call.op().schema().returns().size(), self.sizes().vec()));
  return along_dim_rule(call);
}

constexpr auto& scan_rule =
    rule_with_strides<same_sizes_rule, row_major_strides>;

/// The Meta kernel refuses what is not deterministic on CUDA, whatever the
/// device.
Decision chosen_element_rule(Call& call) {
  if (at::globalContext().deterministicAlgorithms()) {
    auto sizes = call.operand(0).tensor.sizes().vec();
    const auto dims = static_cast<int64_t>(sizes.size());
    const auto dim = at::maybe_wrap_dim(call.argument("dim").toInt(), dims);
    if (dims > 0 && call.argument("keepdim").toBool()) {
      sizes[dim] = 1;
    } else if (dims > 0) {
      sizes.erase(sizes.begin() + dim);
    }
    call.set_output_sizes({sizes, sizes});
  }
  return along_dim_rule(call);
}

/// renorm scales each row of `dim` by its norm over all other dims.
Decision renorm_rule(Call& call) {
  const auto dims = call.operand(0).dim();
  const auto dim = call.argument("dim").toInt();
  std::vector<int64_t> own(dims, kPrivate);
  own.at(at::maybe_wrap_dim(dim, dims)) = 0;
  call.set_output_sizes({call.operand(0).spec->sizes()});
  auto decision = rule_by_labels(call, {{own}, {own}}, Linearity::None);
  decision.strides_of = row_major_strides;
  return decision;
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
  check_takes_dtypes(call);
  auto decision = rule_by_labels(call, labels, Linearity::None);
  if (!call.argument("sorter").isNone()) {
    decision.refuses_values = decision.inputs.back();
  }
  return decision;
}

/// bucketize, isin: the first operand pointwise, the second whole.
Decision lookup_rule(Call& call) {
  check_takes_dtypes(call);
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

const RegisterRules scans{
    scan_rule,
    {
        "aten::cumprod",
        "aten::cumprod_",
        "aten::_logcumsumexp",
        "aten::logcumsumexp",
        "aten::cummax",
        "aten::cummin",
    }};
const RegisterRules along_one_dim{
    along_dim_rule,
    {
        "aten::kthvalue",
        "aten::linalg_cross",
    }};
const RegisterRules chosen_elements{
    chosen_element_rule,
    {
        "aten::mode",
        "aten::median.dim",
        "aten::nanmedian.dim",
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

} // namespace shardtensor::detail
