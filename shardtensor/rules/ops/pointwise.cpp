#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <unordered_set>

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/copysign_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/nextafter_ops.h>
#include <ATen/ops/sgn_ops.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/joined_operands.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/dispatch/registry.h"
#include "shardtensor/tensor/gradients/tangent.h"

namespace shardtensor::detail {

namespace {

template <Linearity linearity>
Decision linear_rule(Call& call) {
  return elementwise_rule(call, linearity);
}

// Terms times an infinity, or divided by zero, do not add up to what the sum
// would give.

Decision sum_rule(Call& call) {
  const auto kind = factor_kind(call.argument("alpha").toScalar());
  return elementwise_rule(
      call,
      kind == FactorKind::NotFinite ? Linearity::None : Linearity::Additive);
}

Decision product_rule(Call& call) {
  const bool infinite =
      std::ranges::any_of(call.operands(), [](const Operand& operand) {
        return factor_kind(operand) == FactorKind::NotFinite;
      });
  return elementwise_rule(
      call, infinite ? Linearity::None : Linearity::Product);
}

/// A divisor that is a tensor may have zeros.
Decision quotient_rule(Call& call) {
  const auto kind = factor_kind(call.operand(1));
  const bool nonzero =
      kind == FactorKind::Ordinary || kind == FactorKind::NotFinite;
  return elementwise_rule(call, nonzero ? Linearity::First : Linearity::None);
}

Decision product_with_number_rule(Call& call) {
  const auto kind = factor_kind(call.argument("other").toScalar());
  return elementwise_rule(
      call, kind == FactorKind::NotFinite ? Linearity::None : Linearity::Unary);
}

Decision quotient_by_number_rule(Call& call) {
  const auto kind = factor_kind(call.argument("other").toScalar());
  return elementwise_rule(
      call, kind == FactorKind::Zero ? Linearity::None : Linearity::Unary);
}

/// A cast keeps a sum of terms, unless it rounds each of them to few digits.
Decision cast_rule(Call& call) {
  const auto& dtype = call.argument("dtype");
  const auto rounds = [](at::ScalarType type) {
    return at::isIntegralType(type, true) || at::isReducedFloatingType(type);
  };
  const bool rounded =
      dtype.isInt() && rounds(static_cast<at::ScalarType>(dtype.toInt()));
  return elementwise_rule(call, rounded ? Linearity::None : Linearity::Unary);
}

/// fill and the like: the old values do not count, the layout stays.
Decision overwrite_rule(Call& call) {
  const auto& filled = call.operand(0).spec;
  const auto layout = filled ? without_partial(filled) : nullptr;
  Decision decision;
  for (const auto& operand : call.operands()) {
    decision.inputs.push_back(
        operand.argument == 0 || operand.written ? layout
            : operand.spec                       ? replicated(operand.spec)
                                                 : nullptr);
  }
  decision.outputs = {layout};
  decision.strides_of = strides_of_elements;
  return decision;
}

/// The buffer that it leaves for backward has no elements on GPUs.
Decision log_sigmoid_rule(Call& call) {
  auto decision = pointwise_rule(call);
  if (call.operand(0).tensor.is_cuda()) {
    decision.outputs.at(1) = nullptr;
  }
  return decision;
}

Decision log_sigmoid_backward_rule(Call& call) {
  const auto& buffer = call.operand(2);
  if (buffer.tensor.sizes() == call.operand(1).tensor.sizes()) {
    return pointwise_rule(call);
  }
  const auto sizes = at::infer_size(
      call.operand(0).tensor.sizes(), call.operand(1).tensor.sizes());
  call.set_output_sizes({sizes});
  Labels labels;
  auto& output = labels.outputs.emplace_back(sizes.size());
  std::iota(output.begin(), output.end(), 0);
  for (size_t i : {0, 1}) {
    labels.operands.push_back(broadcast_to(call.operand(i), sizes, output));
  }
  labels.operands.emplace_back(buffer.dim(), kPrivate);
  auto decision = rule_by_labels(call, labels, Linearity::None);
  decision.strides_of = strides_of_elements;
  return decision;
}

const std::vector<RuleEntry>& linear_rules() {
  constexpr auto copy = linear_rule<Linearity::Copy>;
  constexpr auto unary = linear_rule<Linearity::Unary>;
  static const std::vector<RuleEntry> table = {
      {"aten::alias", copy},
      {"aten::detach", copy},
      {"aten::clone", copy},
      {"aten::lift_fresh", copy},
      {"aten::_to_copy", cast_rule},
      {"aten::_conj", unary},
      {"aten::_conj_physical", unary},
      {"aten::_neg_view", unary},
      {"aten::neg", unary},
      {"aten::neg_", unary},
      {"aten::mul.Scalar", product_with_number_rule},
      {"aten::mul_.Scalar", product_with_number_rule},
      {"aten::div.Scalar", quotient_by_number_rule},
      {"aten::div_.Scalar", quotient_by_number_rule},
      {"aten::add.Tensor", sum_rule},
      {"aten::add_.Tensor", sum_rule},
      {"aten::sub.Tensor", sum_rule},
      {"aten::sub_.Tensor", sum_rule},
      {"aten::rsub.Tensor", sum_rule},
      {"aten::complex", linear_rule<Linearity::Additive>},
      {"aten::mul.Tensor", product_rule},
      {"aten::mul_.Tensor", product_rule},
      {"aten::div.Tensor", quotient_rule},
      {"aten::div_.Tensor", quotient_rule},
      {"aten::fill.Scalar", overwrite_rule},
      {"aten::fill.Scalar_out", overwrite_rule},
      {"aten::fill.Tensor", overwrite_rule},
      {"aten::fill.Tensor_out", overwrite_rule},
      {"aten::fill_.Scalar", overwrite_rule},
      {"aten::fill_.Tensor", overwrite_rule},
      {"aten::zero_", overwrite_rule},
      {"aten::log_sigmoid_forward", log_sigmoid_rule},
      {"aten::log_sigmoid_backward", log_sigmoid_backward_rule},
  };
  return table;
}

/// Pointwise operators that do not carry PyTorch's `pointwise` tag, or did not
/// in 2.11.
constexpr const char* kUntagged[] = {
    "aten::copy_",
    "aten::where.self",
    "aten::isnan",
    "aten::floor_divide",
    "aten::floor_divide_.Tensor",
    "aten::hardswish",
    "aten::leaky_relu",
    "aten::_prelu_kernel",
    "aten::_prelu_kernel_backward",
    "aten::sigmoid_backward",
    "aten::tanh_backward",
    "aten::logit_backward",
    "aten::softplus_backward",
    "aten::silu_backward",
    "aten::mish_backward",
    "aten::hardswish_backward",
    "aten::hardsigmoid_backward",
    "aten::hardtanh_backward",
    "aten::hardshrink_backward",
    "aten::softshrink_backward",
    "aten::leaky_relu_backward",
    "aten::rrelu_with_noise_backward",
    "aten::elu_backward",
    "aten::gelu_backward",
    "aten::threshold_backward",
    "aten::native_dropout_backward",
    "aten::_standard_gamma_grad",
    "aten::_dirichlet_grad",
    "aten::polar",
    "aten::lerp.Scalar",
    "aten::lerp.Tensor",
};

/// Of integers they raise where the divisor is zero.
bool divides_integers(const std::string& op) {
  const auto begins = [&](const char* name) { return op.rfind(name, 0) == 0; };
  return begins("aten::floor_divide") || begins("aten::fmod") ||
      begins("aten::remainder") ||
      (begins("aten::div") && op.find("_mode") != std::string::npos);
}

/// Whether ranks look at other parts of the divisor, of which one is zero.
bool cuts_divisor(const Call& call, const Decision& decision) {
  const auto divisor = call.argument_index("other");
  for (size_t i = 0; i < decision.inputs.size(); ++i) {
    const auto& needed = decision.inputs[i];
    if (call.operand(i).argument == divisor && needed && needed->is_sharded()) {
      return true;
    }
  }
  return false;
}

/// A divisor that all ranks hold is zero on all that have anything to divide.
Decision division_rule(Call& call) {
  auto decision = pointwise_rule(call);
  const auto& operands = call.operands();
  const bool of_integers =
      std::all_of(operands.begin(), operands.end(), [](const Operand& operand) {
        return at::isIntegralType(operand.tensor.scalar_type(), true);
      });
  const auto& layout = decision.outputs[0];
  if (!of_integers || !layout || !layout->is_sharded()) {
    return decision;
  }
  if (cuts_divisor(call, decision) || layout->has_empty_piece()) {
    decision.refuses_values = layout;
  }
  return decision;
}

/// Tagged, too, but not pointwise: equal gives one bool, renorm scales rows by
/// their norm.
bool is_mistagged(const std::string& name) {
  return name == "aten::equal" || name.rfind("aten::renorm", 0) == 0;
}

bool is_pointwise(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::pointwise) &&
      !op.hasTag(at::Tag::nondeterministic_seeded) &&
      !is_mistagged(op.operator_name().name);
}

/// The operator whose in-place or out= form this is: "aten::abs" of
/// "aten::abs_", "aten::where.self" of "aten::where.self_out". Forms often miss
/// the tag.
std::optional<std::string> functional_name(const c10::OperatorName& form) {
  auto name = form.name;
  auto overload = form.overload_name;
  if (name.ends_with('_')) {
    name.pop_back();
  } else if (overload == "out" || overload == "grad_input") {
    overload.clear();
  } else if (overload.ends_with("_out")) {
    overload.resize(overload.size() - 4);
  } else {
    return {};
  }
  return c10::toString(c10::OperatorName(name, overload));
}

/// The first operand, in whatever order, is copied into row-major memory.
constexpr auto& copied_rule =
    rule_with_strides<pointwise_rule, row_major_strides>;

Decision angle_rule(Call& call) {
  auto decision = pointwise_rule(call);
  decision.strides_of = [](const Call& made,
                           const std::vector<int64_t>& sizes) {
    return made.operand(0).tensor.is_complex()
        ? row_major_strides(made, sizes)
        : strides_of_elements(made, sizes);
  };
  return decision;
}

constexpr RuleEntry kInAnotherOrder[] = {
    {"aten::angle", angle_rule},
    {"aten::masked_fill.Scalar", copied_rule},
    {"aten::masked_fill.Tensor", copied_rule},
    {"aten::mvlgamma", copied_rule},
    {"aten::pow.Scalar", copied_rule},
    {"aten::pow.Scalar_out", copied_rule},
};

Rule pointwise_rule_of(const std::string& op) {
  return divides_integers(op) ? division_rule : pointwise_rule;
}

const bool registered = [] {
  std::unordered_set<std::string> seen;
  const auto add = [&](const std::string& op, Rule rule) {
    if (seen.insert(op).second) {
      register_rule(op, rule);
      note_elementwise(op);
    }
  };
  for (const auto& entry : linear_rules()) {
    add(entry.op, entry.rule);
  }
  for (const auto& entry : kInAnotherOrder) {
    add(entry.op, entry.rule);
  }
  for (const char* op : kUntagged) {
    add(op, pointwise_rule_of(op));
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (op && name.name.rfind("aten::", 0) == 0 && is_pointwise(*op)) {
      add(c10::toString(name), pointwise_rule_of(c10::toString(name)));
    }
  }
  const auto functional = seen;
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto found = functional_name(name);
    if (found && functional.count(*found)) {
      add(c10::toString(name), pointwise_rule_of(c10::toString(name)));
    }
  }
  return true;
}();

} // namespace

// Note [Zero gradients]
// Where a derivative is zero, some of PyTorch's formulas return a plain tensor
// of zeros of the global size. It is made sharded before anybody sees it.

namespace {

struct ZeroGradientBackward : torch::autograd::Node {
  explicit ZeroGradientBackward(SpecPtr spec) : spec_(std::move(spec)) {}
  std::string name() const override {
    return "ShardTensorZeroGradientBackward";
  }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& grads) override {
    return {
        grads[0].defined()
            ? redistribute(promote(grads[0], spec_->mesh()), spec_)
            : grads[0]};
  }
  SpecPtr spec_;
};

/// The same tensor, whose gradient may arrive plain.
at::Tensor with_sharded_gradient(const at::Tensor& tensor) {
  if (!is_shard_tensor(tensor) || !needs_node(tensor)) {
    return tensor;
  }
  auto result = tensor.detach();
  check_no_tangent("an operator whose derivative is zero", tensor);
  connect<ZeroGradientBackward>(result, tensor, without_partial(spec(tensor)));
  return result;
}

at::Tensor sgn_function(c10::DispatchKeySet keys, const at::Tensor& self) {
  return at::_ops::sgn::redispatch(
      below_function_level(keys), with_sharded_gradient(self));
}

/// masked_fill's formula selects the value's gradient by the mask, in the order
/// of elements; where's sums it as it lies.
bool has_gradient(const at::Tensor& value) {
  return at::GradMode::is_enabled() && value.requires_grad() &&
      value.dim() == 0;
}

at::Tensor masked_fill_function(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    const at::Tensor& mask,
    const at::Tensor& value) {
  return has_gradient(value)
      ? at::where(mask, value.to(self.scalar_type()), self)
      : without_rule<at::_ops::masked_fill_Tensor>(keys, self, mask, value);
}

at::Tensor& masked_fill_in_place_function(
    c10::DispatchKeySet keys,
    at::Tensor& self,
    const at::Tensor& mask,
    const at::Tensor& value) {
  return has_gradient(value)
      ? self.copy_(at::where(mask, value.to(self.scalar_type()), self))
      : without_rule<at::_ops::masked_fill__Tensor>(keys, self, mask, value);
}

template <class Op>
at::Tensor second_argument_function(
    c10::DispatchKeySet keys,
    const at::Tensor& self,
    const at::Tensor& other) {
  return without_rule<Op>(keys, self, with_sharded_gradient(other));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  namespace ops = at::_ops;
  m.impl(
      "copysign.Tensor",
      function_rule<
          ops::copysign_Tensor,
          second_argument_function<ops::copysign_Tensor>>);
  m.impl(
      "nextafter",
      function_rule<ops::nextafter, second_argument_function<ops::nextafter>>);
  m.impl("sgn", function_rule<ops::sgn, sgn_function>);
  m.impl(
      "masked_fill.Tensor",
      function_rule<ops::masked_fill_Tensor, masked_fill_function>);
  m.impl(
      "masked_fill_.Tensor",
      function_rule<ops::masked_fill__Tensor, masked_fill_in_place_function>);
}

} // namespace shardtensor::detail
