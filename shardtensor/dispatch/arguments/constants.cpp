#include "shardtensor/dispatch/arguments/constants.h"

#include <string>
#include <unordered_set>

#include <ATen/core/LegacyTypeDispatch.h>

#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/registry.h"
#include "shardtensor/layout/plans/constant_layout.h"
#include "shardtensor/tensor/constant.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

bool is_constant(const at::Tensor& tensor) {
  return is_shard_tensor(tensor) && constant_view_of(tensor);
}

bool is_constant(const c10::IValue& value) {
  return value.isTensor() && is_constant(value.toTensor());
}

/// The layout of the largest tensor that is cut, or a sum of terms, among those
/// arguments whose rows come to the same rows of `target`: all of an
/// elementwise operator, most likely those of the same sizes of others. Null
/// without one.
SpecPtr written_layout(
    const c10::OperatorHandle& op,
    at::ArrayRef<c10::IValue> arguments,
    const at::Tensor& target) {
  const bool all = is_elementwise(op.operator_name());
  SpecPtr largest;
  for (const auto& value : arguments) {
    visit_tensors(value, [&](const at::Tensor& tensor) {
      if (is_shard_tensor(tensor) && !spec(tensor)->is_replicated() &&
          (all || tensor.sizes() == target.sizes()) &&
          (!largest || largest->numel() < spec(tensor)->numel())) {
        largest = spec(tensor);
      }
    });
  }
  return largest;
}

/// Its kernel knows better what layout fits: Note [Rows that are made].
bool begins_itself(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names{
      "aten::scatter_add_",
      "aten::scatter_reduce_",
      "aten::index_add_",
      "aten::index_reduce_",
      "aten::index_put_",
      "aten::_index_put_impl_"};
  return names.count(op.operator_name().name) > 0;
}

/// Where nothing says before which layout fits, an operator that reads what is
/// cut says so by its result.
void begin_before_call(
    const c10::OperatorHandle& op,
    at::ArrayRef<c10::IValue> arguments,
    const at::Tensor& target) {
  const auto layout = written_layout(op, arguments, target);
  bool reads_cut = false;
  for (const auto& value : arguments) {
    visit_tensors(value, [&](const at::Tensor& tensor) {
      reads_cut |= is_shard_tensor(tensor) && !spec(tensor)->is_replicated();
    });
  }
  if (layout || !reads_cut || is_elementwise(op.operator_name())) {
    begin_write(*impl_of(target), layout);
  }
}

bool may_know_zeros(const c10::IValue& value) {
  return value.isTensor() && is_shard_tensor(value.toTensor()) &&
      impl_of(value.toTensor())->may_know_zeros();
}

std::optional<Box> zeros_of_sum(
    const c10::OperatorHandle& op,
    at::ArrayRef<c10::IValue> arguments) {
  if (arguments.size() != 3 || !may_know_zeros(arguments[0]) ||
      !may_know_zeros(arguments[1])) {
    return {};
  }
  const auto& [name, overload] = op.operator_name();
  const bool adds = name == "aten::add" || name == "aten::add_";
  return adds && overload == "Tensor" && arguments[2].toScalar().equal(1)
      ? nonzero_box_of_sum(arguments[0].toTensor(), arguments[1].toTensor())
      : std::nullopt;
}

/// Without autograd and modes, which have seen the view when it was made.
at::Tensor view_again(
    const c10::OperatorHandle& op,
    torch::jit::Stack arguments,
    size_t viewed,
    size_t result,
    const at::Tensor& tensor) {
  const at::AutoDispatchBelowAutograd below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet(
          {c10::DispatchKey::ADInplaceOrView,
           c10::DispatchKey::Python,
           c10::DispatchKey::PythonTLSSnapshot,
           c10::DispatchKey::Functionalize}));
  arguments[viewed] = tensor;
  op.callBoxed(&arguments);
  const auto& given = arguments.at(0);
  return given.isTensor() ? given.toTensor() : given.toTensorVector()[result];
}

} // namespace

bool writes_constant(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto first = stack.size() - schema.arguments().size();
  bool found = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    found = found || (is_written(op, i) && is_constant(stack[first + i]));
  }
  return found;
}

ConstantsOfCall::ConstantsOfCall(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack)
    : op_(op) {
  const auto& schema = op.schema();
  const auto arguments = at::ArrayRef<c10::IValue>(stack).slice(
      stack.size() - schema.arguments().size());
  size_t written = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_written(op, i)) {
      visit_tensors(arguments[i], [&](const at::Tensor& tensor) {
        ++written;
        if (is_constant(tensor) && !begins_itself(op)) {
          begun_ = impl_of(tensor)->constant_view();
          begin_before_call(op, arguments, tensor);
        } else if (is_shard_tensor(tensor)) {
          still_zero_ = zeros_beside_write(tensor);
        }
      });
    } else if (
        arguments_.empty() && schema.arguments()[i].alias_info() &&
        is_constant(arguments[i])) {
      viewed_ = i;
      arguments_ = arguments.vec();
    }
  }
  sum_ = zeros_of_sum(op, arguments);
  if (written > 1) { // perhaps other parts of one constant
    begun_ = nullptr;
    still_zero_.reset();
  }
}

void ConstantsOfCall::finish(const torch::jit::Stack& stack) const {
  if (begun_ && begun_->view && begun_->constant->is_zero() &&
      begun_->constant->written().is_complex()) { // transforms ask
    if (const auto shown = geometry(*begun_)) {
      note_known_zeros(
          begun_->constant->written(),
          shown_box(begun_->constant->sizes(), *shown));
    }
  }
  if (still_zero_) {
    note_known_zeros(still_zero_->base, still_zero_->box);
  }
  if (sum_) {
    note_known_zeros(stack.back().toTensor(), *sum_);
  }
  if (arguments_.empty()) {
    return;
  }
  const auto seen = impl_of(arguments_[viewed_].toTensor())->constant_view();
  auto arguments = arguments_;
  arguments[viewed_] = c10::IValue(); // it would hold itself
  size_t next = 0;
  visit_tensors(stack.back(), [&](const at::Tensor& result) {
    const auto index = next++;
    if (!seen || !is_shard_tensor(result) || constant_view_of(result)) {
      return; // the operators inside a composite one noted it
    }
    const auto view = [op = op_, arguments, viewed = viewed_, index, seen](
                          const at::Tensor& whole) {
      return view_again(
          op, arguments, viewed, index, seen->view ? seen->view(whole) : whole);
    };
    impl_of(result)->set_constant_view(
        std::make_shared<const ConstantView>(
            ConstantView{seen->constant, view}));
  });
}

} // namespace shardtensor::detail
