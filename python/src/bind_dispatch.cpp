#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings.h"
#include "shardtensor/dispatch/handlers.h"
#include "shardtensor/tensor/keys.h"

namespace shardtensor::python {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

bool is_default(const c10::Argument& argument, const c10::IValue& value) {
  const auto& usual = argument.default_value();
  return usual && !value.isTensor() && !value.isList() && *usual == value;
}

/// The arguments as a caller would write them: defaults at the end left out.
std::pair<py::tuple, py::dict> python_arguments(
    const c10::FunctionSchema& schema,
    const std::vector<c10::IValue>& values) {
  py::list args;
  py::dict kwargs;
  size_t positional = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (!argument.kwarg_only() && !is_default(argument, values[i])) {
      positional = i + 1;
    }
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (argument.kwarg_only()) {
      if (!is_default(argument, values[i])) {
        kwargs[argument.name().c_str()] = torch::jit::toPyObject(values[i]);
      }
    } else if (i < positional) {
      args.append(torch::jit::toPyObject(values[i]));
    }
  }
  return {py::tuple(args), kwargs};
}

void push_results(
    const c10::FunctionSchema& schema,
    const py::object& result,
    Stack* stack) {
  const auto& returns = schema.returns();
  if (returns.empty()) {
    return;
  }
  if (returns.size() == 1) {
    stack->push_back(torch::jit::toIValue(result, returns[0].type()));
    return;
  }
  const auto results = py::cast<py::tuple>(result);
  TORCH_CHECK_VALUE(
      results.size() == returns.size(),
      "dispatch handler of ",
      schema.operator_name(),
      ": expected ",
      returns.size(),
      " results, got ",
      results.size());
  for (size_t i = 0; i < returns.size(); ++i) {
    stack->push_back(torch::jit::toIValue(results[i], returns[i].type()));
  }
}

/// A Python function of (*args, **kwargs) as the kernel of an operator.
class PythonHandler {
 public:
  explicit PythonHandler(py::function function)
      : function_(std::move(function)) {}

  void operator()(const OperatorHandle& op, Stack* stack) const {
    const py::gil_scoped_acquire gil;
    const auto values = torch::jit::pop(*stack, op.schema().arguments().size());
    const auto [args, kwargs] = python_arguments(op.schema(), values);
    push_results(op.schema(), function_(*args, **kwargs), stack);
  }

 private:
  py::function function_;
};

/// The function is released under the GIL, whoever drops it last.
Handler make_handler(py::function function) {
  auto* raw = new PythonHandler(std::move(function));
  std::shared_ptr<PythonHandler> held(raw, [](PythonHandler* handler) {
    if (!Py_IsInitialized()) {
      return; // the interpreter is gone, and the function with it
    }
    py::gil_scoped_acquire gil;
    delete handler;
  });
  return [held](const OperatorHandle& op, Stack* stack) { (*held)(op, stack); };
}

/// Sizes that a compiler would keep open, as the numbers they have: layouts
/// know no others.
void fix_sizes(Stack& stack) {
  const auto number = [](const c10::IValue& value) {
    return value.toSymInt().guard_int(__FILE__, __LINE__);
  };
  for (auto& value : stack) {
    if (value.isSymInt()) {
      value = number(value);
    } else if (value.isList() && !value.isIntList()) {
      const auto elements = value.toListRef();
      const auto is_open = [](const c10::IValue& each) {
        return each.isSymInt();
      };
      if (std::any_of(elements.begin(), elements.end(), is_open)) {
        c10::List<int64_t> fixed;
        std::transform(
            elements.begin(),
            elements.end(),
            std::back_inserter(fixed),
            number);
        value = std::move(fixed);
      }
    }
  }
}

/// Calls an operator below the Python key, as __torch_dispatch__ must while
/// torch.compile traces.
py::object run_operator(
    const std::string& name,
    const std::string& overload,
    const py::args& args,
    const py::kwargs& kwargs) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      name.c_str(), overload.c_str());
  // Wrapped numbers arrive as plain ones.
  const torch::jit::ToIValueAllowNumbersAsTensors numbers(true);
  auto stack =
      torch::jit::createStackForSchema(op.schema(), args, kwargs, std::nullopt);
  fix_sizes(stack);
  {
    const py::gil_scoped_release release;
    op.redispatchBoxed(c10::DispatchKeySet(kDispatchKey), &stack);
  }
  return torch::jit::createPyObjectForStack(std::move(stack));
}

} // namespace

void bind_dispatch(py::module_& module) {
  module.def(
      "set_handler",
      [](const std::string& op, py::function function) {
        set_handler(op, make_handler(std::move(function)));
      },
      py::arg("op"),
      py::arg("function"));
  module.def("remove_handler", &remove_handler, py::arg("op"));
  module.def("run_operator", &run_operator);
}

} // namespace shardtensor::python
