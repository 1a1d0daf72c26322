#include "shardtensor/dispatch/functional_form.h"

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>

#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/call.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/registry.h"
#include "shardtensor/tensor/redistribute.h"

namespace shardtensor::detail {
namespace {

using c10::FunctionSchema;
using c10::OperatorHandle;
using torch::jit::Stack;

// ---- which operator it is ---------------------------------------------------

bool is_out(const c10::Argument& argument) {
  return argument.kwarg_only() && argument.alias_info() &&
      argument.alias_info()->isWrite();
}

/// Those that the functional form has, too: all but out=.
std::vector<const c10::Argument*> inputs_of(const FunctionSchema& schema) {
  std::vector<const c10::Argument*> inputs;
  for (const auto& argument : schema.arguments()) {
    if (!is_out(argument)) {
      inputs.push_back(&argument);
    }
  }
  return inputs;
}

bool takes_the_same(const FunctionSchema& one, const FunctionSchema& other) {
  const auto a = inputs_of(one);
  const auto b = inputs_of(other);
  if (a.size() != b.size()) {
    return false;
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i]->name() != b[i]->name() || *a[i]->type() != *b[i]->type()) {
      return false;
    }
  }
  return true;
}

size_t written_arguments(const FunctionSchema& schema) {
  size_t count = 0;
  for (const auto& argument : schema.arguments()) {
    count += argument.alias_info() && argument.alias_info()->isWrite();
  }
  return count;
}

size_t out_arguments(const FunctionSchema& schema) {
  return schema.arguments().size() - inputs_of(schema).size();
}

/// Of an out= operator also one that writes into the same inputs as that does:
/// running statistics.
bool is_functional_form(const FunctionSchema& op, const FunctionSchema& other) {
  const auto results = out_arguments(op);
  return takes_the_same(op, other) && out_arguments(other) == 0 &&
      (results > 0 ? other.returns().size() == results
                   : !other.is_mutable() &&
               other.returns().size() == written_arguments(op));
}

/// "aten::addmm" of addmm.out and of addmm_.
std::string functional_name(const FunctionSchema& schema) {
  auto name = schema.name();
  if (name.back() == '_') {
    name.pop_back();
  }
  return name;
}

std::optional<OperatorHandle> find_functional_form(const OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto name = functional_name(schema);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& candidate : dispatcher.getAllOpNames()) {
    if (candidate.name != name) {
      continue;
    }
    const auto found = dispatcher.findSchema(candidate);
    if (found && is_functional_form(schema, found->schema())) {
      return found;
    }
  }
  return std::nullopt;
}

std::optional<OperatorHandle> functional_form(const OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::
      unordered_map<c10::OperatorName, std::optional<OperatorHandle>>();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto entry = known->find(op.operator_name());
  if (entry != known->end()) {
    return entry->second;
  }
  return known->emplace(op.operator_name(), find_functional_form(op))
      .first->second;
}

// ---- its results ------------------------------------------------------------

/// What the results are written into: the arguments themselves, in order.
std::vector<c10::IValue> targets_of(
    const OperatorHandle& op,
    at::ArrayRef<c10::IValue> arguments) {
  std::vector<c10::IValue> targets;
  const bool has_out = out_arguments(op.schema()) > 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (has_out ? is_out(op.schema().arguments()[i]) : is_written(op, i)) {
      targets.push_back(arguments[i]);
    }
  }
  return targets;
}

bool fits(const at::Tensor& result, const at::Tensor& target) {
  return result.sizes() == target.sizes() && result.dtype() == target.dtype();
}

/// Raises PyTorch's own error where results of other sizes or dtypes may not be
/// written, and says when a tensor is resized.
void check_on_meta(const OperatorHandle& op, const Stack& arguments) {
  Call(op, arguments).output_sizes();
}

/// The same where only values tell the sizes, which no Meta kernel knows.
void check_computed(
    const OperatorHandle& op,
    const at::Tensor& result,
    const at::Tensor& target) {
  TORCH_CHECK(
      result.dtype() == target.dtype(),
      c10::toString(op.operator_name()),
      ": expected an out of dtype ",
      result.dtype(),
      ", got ",
      target.dtype());
  const auto like =
      at::empty(target.sizes(), target.options().device(at::kMeta));
  at::native::resize_output(like, result.sizes());
}

/// Whether PyTorch writes its numbers, 0 and 1, in any dtype.
bool takes_any_type(const OperatorHandle& op) {
  return op.operator_name().name == "aten::bernoulli";
}

/// What PyTorch checks while it computes.
void check_types(
    const OperatorHandle& op,
    at::ArrayRef<at::Tensor> results,
    at::ArrayRef<at::Tensor> targets) {
  if (op.operator_name().name != "aten::aminmax") {
    return;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    TORCH_CHECK(
        results[i].dtype() == targets[i].dtype(),
        "Expected out tensor to have dtype ",
        results[i].dtype(),
        ", but got ",
        targets[i].dtype(),
        " instead");
  }
}

void write_whole(const at::Tensor& plain, const at::Tensor& result) {
  const auto& layout = spec(result);
  if (layout->is_sharded()) {
    note_fallback("writing into a plain tensor", layout, replicated(layout));
  }
  const auto whole = full_tensor(result);
  at::native::resize_output(plain, whole.sizes());
  plain.copy_(whole);
}

/// A result that may be kept: an operator may return its input, or be a
/// composite one that fills a plain tensor.
at::Tensor own(const at::Tensor& result, const Stack& arguments) {
  for (const auto& given : all_tensors_in(arguments)) {
    if (!is_shard_tensor(given)) {
      continue;
    }
    if (!is_shard_tensor(result)) {
      return promote(result, spec(given)->mesh());
    }
    const auto& local = impl_of(result)->local();
    if (impl_of(given)->local().is_alias_of(local)) {
      return wrap(local.clone(), spec(result), result.strides());
    }
  }
  return result;
}

/// The part of a result in the type of what it is written into; a Partial stays
/// one if nothing is converted.
Local converted(const at::Tensor& result, at::ScalarType type) {
  if (result.scalar_type() == type) {
    return {impl_of(result)->local(), spec(result)};
  }
  const auto part = local_of(result);
  return {part.tensor.to(type), part.spec};
}

void write_result(
    const OperatorHandle& op,
    const at::Tensor& target,
    const at::Tensor& result) {
  if (!is_shard_tensor(target)) {
    write_whole(target, result);
    return;
  }
  auto* impl = impl_of(target);
  const auto part = converted(result, target.scalar_type());
  if (target.sizes() == result.sizes()) {
    begin_write(*impl, part.spec->is_replicated() ? nullptr : part.spec);
    impl->separate_elements();
    write_local(target, part.tensor, part.spec);
    return;
  }
  TORCH_CHECK_VALUE(
      op.operator_name().name.back() != '_',
      c10::toString(op.operator_name()),
      ": the result has sizes ",
      result.sizes(),
      ", it cannot be written into a tensor of sizes ",
      target.sizes());
  impl->set(part.tensor, part.spec, result.strides());
  note_written(target);
}

Stack functional_call(const OperatorHandle& op, const Stack& arguments) {
  Stack call;
  const auto& schema = op.schema();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_out(schema.arguments()[i])) {
      call.push_back(arguments[i]);
    }
  }
  return call;
}

/// Reductions and scans compute in the type of an out= that differs from what
/// they would give; complex numbers stay that.
bool compute_in_type_of(
    const at::Tensor& target,
    const at::Tensor& result,
    const OperatorHandle& functional,
    Stack& call) {
  const auto index = functional.schema().argumentIndexWithName("dtype");
  if (!index || !call[*index].isNone() ||
      target.scalar_type() == result.scalar_type() ||
      target.is_complex() != result.is_complex()) {
    return false;
  }
  call[*index] = target.scalar_type();
  return true;
}

/// The results of the functional form.
std::vector<at::Tensor> computed(
    const OperatorHandle& op,
    const OperatorHandle& functional,
    const Stack& arguments,
    const std::vector<at::Tensor>& targets) {
  auto call = functional_call(op, arguments);
  auto results = call;
  functional.callBoxed(&results);
  auto values = all_tensors_in(results);
  TORCH_CHECK_VALUE(
      values.size() == targets.size(),
      c10::toString(op.operator_name()),
      ": expected ",
      values.size(),
      " tensors to write into, got ",
      targets.size());
  if (call.size() < arguments.size() && !values.empty() &&
      compute_in_type_of(targets[0], values[0], functional, call)) {
    functional.callBoxed(&call);
    values = all_tensors_in(call);
  }
  return values;
}

void run(
    const OperatorHandle& op,
    const OperatorHandle& functional,
    Stack* stack) {
  const auto arguments =
      torch::jit::pop(*stack, op.schema().arguments().size());
  auto returned = targets_of(op, arguments);
  const auto targets = all_tensors_in(returned);
  const auto values = computed(op, functional, arguments, targets);
  for (size_t i = 0; i < values.size(); ++i) {
    if (functional.hasTag(at::Tag::dynamic_output_shape)) {
      check_computed(op, values[i], targets[i]);
    } else if (!fits(values[i], targets[i]) && !takes_any_type(op)) {
      check_on_meta(op, arguments);
      check_types(op, values, targets);
      break;
    }
  }
  for (size_t i = 0; i < values.size(); ++i) {
    write_result(op, targets[i], own(values[i], arguments));
  }
  if (!op.schema().returns().empty()) {
    std::move(returned.begin(), returned.end(), std::back_inserter(*stack));
  }
}

} // namespace

bool run_functional_form(const OperatorHandle& op, Stack* stack) {
  if (!op.schema().is_mutable()) {
    return false;
  }
  const auto functional = functional_form(op);
  if (!functional || is_gathered(functional->operator_name())) {
    return false;
  }
  run(op, *functional, stack);
  return true;
}

namespace {

/// Of a call that writes into out= and whose functional form may stand in.
std::optional<OperatorHandle> form_of_out_call(
    const OperatorHandle& op,
    const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  if (arguments.empty() || !is_out(arguments.back())) {
    return std::nullopt;
  }
  const auto given =
      at::ArrayRef<c10::IValue>(stack).slice(stack.size() - arguments.size());
  for (const auto& tensor : all_tensors_in(given)) {
    if (at::GradMode::is_enabled() && tensor.requires_grad()) {
      return std::nullopt; // PyTorch says so
    }
  }
  return functional_form(op);
}

} // namespace

bool run_functional_form_into_all(const OperatorHandle& op, Stack* stack) {
  const auto functional = form_of_out_call(op, *stack);
  if (functional) {
    run(op, *functional, stack);
  }
  return functional.has_value();
}

bool run_composite_out(const OperatorHandle& op, Stack* stack) {
  if (!op.hasKernelForDispatchKey(
          c10::DispatchKey::CompositeImplicitAutograd)) {
    return false;
  }
  const auto functional = form_of_out_call(op, *stack);
  if (!functional) {
    return false;
  }
  const auto targets = all_tensors_in(
      targets_of(op, torch::jit::last(*stack, op.schema().arguments().size())));
  for (const auto& target : targets) {
    if (!is_shard_tensor(target)) {
      return false;
    }
  }
  run(op, *functional, stack);
  for (const auto& target : targets) {
    if (!target.is_inference()) {
      target.unsafeGetTensorImpl()->bump_version();
    }
  }
  return true;
}

} // namespace shardtensor::detail
