#include "shardtensor/dispatch/arguments/plain_writes.h"

#include <memory>
#include <string>

#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/functional_form.h"

namespace shardtensor::detail {
namespace {

struct Written {
  bool plain = false;
  bool sharded = false;
  bool listed = false;
};

Written written_tensors(
    const c10::OperatorHandle& op,
    at::ArrayRef<c10::IValue> arguments) {
  Written written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_written(op, i)) {
      written.listed = written.listed || arguments[i].isTensorList();
      visit_tensors(arguments[i], [&](const at::Tensor& tensor) {
        (is_shard_tensor(tensor) ? written.sharded : written.plain) = true;
      });
    }
  }
  return written;
}

at::Tensor gathered(const at::Tensor& tensor, const std::string& op) {
  if (!is_shard_tensor(tensor)) {
    if (must_promote(tensor)) {
      check_promotion(tensor, op.c_str());
    }
    return tensor;
  }
  if (spec(tensor)->is_sharded()) {
    note_fallback(op, spec(tensor), replicated(spec(tensor)));
  }
  return full_tensor(tensor);
}

/// A gradient of a plain tensor is plain, as PyTorch's nodes before it are.
struct GatherGradient : torch::autograd::FunctionPreHook {
  explicit GatherGradient(size_t output) : output_(output) {}
  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& grads) override {
    auto result = grads;
    if (is_shard_tensor(result[output_])) {
      result[output_] = full_tensor(result[output_]);
    }
    return result;
  }
  size_t output_;
};

void gather_gradients(const torch::jit::Stack& results) {
  for (const auto& value : results) {
    visit_tensors(value, [](const at::Tensor& tensor) {
      const auto& whole = tensor.is_view() ? tensor._base() : tensor;
      if (const auto& node = whole.grad_fn()) {
        node->add_tensor_pre_hook(
            std::make_unique<GatherGradient>(whole.output_nr()));
      }
    });
  }
}

void run_on_plain(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto name = c10::toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.operator_name().name != "aten::set_",
      name,
      ": a plain tensor cannot take the memory of a ShardTensor; use copy_(), "
      "full_tensor() or to_local()");
  {
    const CommScope scope(name);
    const auto count = op.schema().arguments().size();
    for (auto value = stack->end() - static_cast<int64_t>(count);
         value != stack->end();
         ++value) {
      *value = with_tensors(*value, [&](const at::Tensor& tensor) {
        return gathered(tensor, name);
      });
    }
  }
  op.callBoxed(stack);
  gather_gradients(*stack);
}

/// Where rows are only added (the degrees of nodes), their sums are gathered
/// instead of the rows: `plain` takes what the operator makes of zeros.
bool adds_rows(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return name == "aten::scatter_add_" || name == "aten::index_add_";
}

void add_sums(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments =
      torch::jit::pop(*stack, op.schema().arguments().size());
  const CommScope scope(c10::toString(op.operator_name()));
  MeshPtr mesh;
  for (const auto& argument : arguments) {
    visit_tensors(argument, [&](const at::Tensor& tensor) {
      mesh = is_shard_tensor(tensor) ? spec(tensor)->mesh() : mesh;
    });
  }
  auto plain = arguments[0].toTensor();
  torch::jit::Stack sums(arguments.begin(), arguments.end());
  sums[0] = promote(at::zeros_like(plain), mesh);
  op.callBoxed(&sums);
  torch::jit::push(*stack, plain.add_(full_tensor(sums[0].toTensor())));
  gather_gradients(*stack);
}

/// The length of the lists that an operator writes.
size_t written_places(
    const c10::OperatorHandle& op,
    at::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_written(op, i) && arguments[i].isTensorList()) {
      return arguments[i].toList().size();
    }
  }
  return 0;
}

c10::IValue at_place(const c10::IValue& value, size_t place, size_t places) {
  if (!value.isList() || value.toList().size() != places) {
    return value;
  }
  const auto list = value.toList();
  c10::impl::GenericList one(list.elementType());
  one.push_back(list.get(place));
  return one;
}

/// An operator on lists, which returns nothing, place by place.
void run_by_place(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto arguments =
      torch::jit::pop(*stack, op.schema().arguments().size());
  const auto places = written_places(op, arguments);
  for (size_t place = 0; place < places; ++place) {
    torch::jit::Stack call;
    for (const auto& argument : arguments) {
      call.push_back(at_place(argument, place, places));
    }
    op.callBoxed(&call);
  }
}

/// What AccumulateGrad calls on a gradient.
bool accumulates(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name().name;
  return name == "aten::detach" || name == "aten::clone" ||
      name == "aten::new_empty_strided" || name == "aten::add";
}

} // namespace

bool is_accumulating_plain() {
  const auto node = torch::autograd::get_current_node();
  const auto* accumulate =
      dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  return accumulate && !is_shard_tensor(accumulate->variable);
}

bool run_accumulating_plain(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack) {
  if (!is_accumulating_plain() || !accumulates(op)) {
    return false;
  }
  run_on_plain(op, stack);
  return true;
}

bool run_writing_plain(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto arguments =
      at::ArrayRef<c10::IValue>(*stack).slice(stack->size() - count);
  const auto written = written_tensors(op, arguments);
  if (!written.plain) {
    return false;
  }
  if (!written.sharded) {
    adds_rows(op) ? add_sums(op, stack) : run_on_plain(op, stack);
    return true;
  }
  if (written.listed && op.schema().returns().empty() &&
      written_places(op, arguments) > 1) {
    run_by_place(op, stack);
    return true;
  }
  return run_functional_form_into_all(op, stack);
}

} // namespace shardtensor::detail
