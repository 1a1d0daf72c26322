#include <algorithm>
#include <numeric>

#include <torch/library.h>

#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/dispatch/rule.h"
#include "shardtensor/tensor/constant.h"

namespace shardtensor::detail {
namespace {

/// zeros_like and friends: the layout of the input, which they do not read.
Decision like_rule(Call& call) {
  Decision decision;
  decision.inputs = {call.operand(0).spec};
  decision.outputs = {without_partial(call.operand(0).spec)};
  decision.keeps_order = true;
  return decision;
}

/// new_zeros(sizes) and friends. The sizes of the input give its layout, others
/// become Replicate.
SpecPtr new_spec(const Call& call) {
  const auto sizes = call.argument("size").toIntVector();
  const auto& like = call.operand(0).spec;
  return like->sizes() == sizes ? without_partial(like)
                                : make_replicated(call.mesh(), sizes);
}

Decision new_rule(Call& call) {
  Decision decision;
  const auto spec = new_spec(call);
  decision.inputs = {nullptr};
  decision.outputs = {spec};
  decision.arguments.emplace_back(
      call.argument_index("size"), spec->local_sizes());
  return decision;
}

/// Other sizes: a constant, which takes the layout of what is written into it.
/// A compiler keeps no such promise.
void new_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto arguments = stack->end() - static_cast<int64_t>(count);
  const auto layout = spec(arguments[0].toTensor());
  const auto local = impl_of(arguments[0].toTensor())->local();
  auto sizes = arguments[1].toIntVector();
  if (layout->sizes() == sizes || is_traced(local)) {
    run_rule(op, new_rule, stack);
    return;
  }
  arguments[0] = local;
  arguments[1] = std::vector<int64_t>{};
  op.callBoxed(stack);
  auto value = stack->back().toTensor();
  const bool is_empty = op.operator_name().name == "aten::new_empty";
  if (is_empty) {
    value.zero_(); // the same on all ranks
  }
  const bool is_zero = is_empty || op.operator_name().name == "aten::new_zeros";
  stack->back() = constant(value, layout->mesh(), std::move(sizes), is_zero);
}

/// The dims of a dense tensor of these strides, the innermost first.
std::vector<int64_t> order_of(const std::vector<int64_t>& strides) {
  std::vector<int64_t> order(strides.size());
  std::iota(order.rbegin(), order.rend(), 0);
  std::ranges::stable_sort(
      order, {}, [&](int64_t dim) { return strides[dim]; });
  return order;
}

Decision new_empty_strided_rule(Call& call) {
  auto decision = new_rule(call);
  const auto index = call.argument_index("stride");
  decision.arguments.emplace_back(
      index,
      dense_strides(
          order_of(call.argument(index).toIntVector()),
          decision.outputs[0]->local_sizes()));
  return decision;
}

const RegisterRules factories{
    {"aten::zeros_like", like_rule},
    {"aten::ones_like", like_rule},
    {"aten::empty_like", like_rule},
    {"aten::full_like", like_rule},
    {"aten::new_empty_strided", new_empty_strided_rule},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  for (const char* name : {"new_zeros", "new_ones", "new_empty", "new_full"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&new_kernel>());
  }
}

} // namespace shardtensor::detail
