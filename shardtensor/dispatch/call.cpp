#include "shardtensor/dispatch/call.h"

#include <cmath>
#include <exception>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DynamicCast.h>

#include "shardtensor/dispatch/arguments/tensor_arguments.h"

namespace shardtensor {

using namespace detail;
namespace {

at::Tensor meta_like(const at::Tensor& tensor) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

bool is_plain_number(const at::Tensor& tensor) {
  return tensor.dim() == 0 && !is_shard_tensor(tensor);
}

/// Kernels take plain 0-d tensors of the host beside any, and may read them.
at::Tensor meta_but_numbers(const at::Tensor& tensor) {
  return is_plain_number(tensor) && tensor.is_cpu() ? tensor
                                                    : meta_like(tensor);
}

/// For operators without a Meta kernel: zeros of the same sizes that take no
/// memory, unless they are written to.
at::Tensor zeros_like(const at::Tensor& tensor, bool written) {
  const auto options = tensor.options();
  return written ? at::zeros(tensor.sizes(), options)
                 : at::zeros({}, options).expand(tensor.sizes());
}

/// PyTorch 2.11 returns what several out= arguments refer to after it has
/// dropped them.
void call_keeping_arguments(
    const c10::OperatorHandle& op,
    torch::jit::Stack* stack) {
  const torch::jit::Stack kept = *stack;
  op.callBoxed(stack);
}

template <class Make>
torch::jit::Stack run_on_meta_tensors(
    const c10::OperatorHandle& op,
    at::ArrayRef<c10::IValue> arguments,
    const Make& make) {
  torch::jit::Stack stack;
  for (const auto& argument : arguments) {
    stack.push_back(
        argument.isDevice() ? c10::Device(at::kMeta)
                            : with_tensors(argument, make));
  }
  call_keeping_arguments(op, &stack);
  return stack;
}

// Note [Meta kernels in Python]
// Python registers its own Meta kernels for most of PyTorch's operators. A C++
// program is without them, and those that compute with a pointwise operator
// import the compiler (torch._dynamo), which takes seconds. So rules find sizes
// without any kernel where they can: by broadcasting, by labels, or because
// an operator keeps them (Call::set_output_sizes). For the others a C++ program
// runs the operator on zeros if it has no Meta kernel in C++, which is slow,
// but only until the decision is cached.

} // namespace

FactorKind factor_kind(const at::Scalar& number) {
  const double magnitude = std::abs(number.toComplexDouble());
  if (!std::isfinite(magnitude)) {
    return FactorKind::NotFinite;
  }
  return magnitude == 0 ? FactorKind::Zero : FactorKind::Ordinary;
}

FactorKind factor_kind(const Operand& operand) {
  const auto& tensor = operand.tensor;
  if (operand.spec || !tensor.unsafeGetTensorImpl()->is_wrapped_number() ||
      !tensor.is_cpu() || tensor.key_set().has(c10::DispatchKey::Python)) {
    return FactorKind::Unknown;
  }
  if (tensor._is_zerotensor()) { // of a tangent: it has no memory
    return FactorKind::Zero;
  }
  // item() would be an operator, which a compiler traces.
  return factor_kind(
      c10::fetch_and_cast<c10::complex<double>>(
          tensor.scalar_type(), tensor.const_data_ptr()));
}

Call::Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
    : op_(op) {
  const auto count = op.schema().arguments().size();
  arguments_ = at::ArrayRef<c10::IValue>(stack).slice(stack.size() - count);
  for (size_t i = 0; i < count; ++i) {
    const bool written = is_written(op, i);
    visit_tensors(arguments_[i], [&](const at::Tensor& tensor) {
      Operand operand{i, tensor, nullptr, written};
      if (is_shard_tensor(tensor)) {
        operand.spec = spec(tensor);
        TORCH_CHECK_VALUE(
            !mesh_ || mesh_ == operand.spec->mesh(),
            name(),
            ": expected all ShardTensors on one mesh, got ",
            *mesh_,
            " and ",
            *operand.spec->mesh());
        mesh_ = operand.spec->mesh();
      }
      operands_.push_back(std::move(operand));
    });
  }
  TORCH_INTERNAL_ASSERT(mesh_, name(), " was called without a ShardTensor");
  for (auto& operand : operands_) {
    if (!operand.spec && operand.tensor.dim() > 0) {
      operand.spec = make_replicated(mesh_, operand.tensor.sizes().vec());
    }
  }
}

std::string Call::name() const {
  return c10::toString(op_.operator_name());
}

size_t Call::argument_index(const char* name) const {
  const auto index = op_.schema().argumentIndexWithName(name);
  TORCH_INTERNAL_ASSERT(index, this->name(), " has no argument ", name);
  return *index;
}

bool Call::has_argument(const char* name) const {
  return op_.schema().argumentIndexWithName(name).has_value();
}

const c10::IValue& Call::argument(const char* name) const {
  return arguments_[argument_index(name)];
}

torch::jit::Stack Call::run_on_meta() const {
  try {
    return run_on_meta_tensors(op_, arguments_, meta_but_numbers);
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (const std::exception&) { // of C++ or of Python's kernels
    for (const auto& operand : operands_) {
      if (is_plain_number(operand.tensor)) {
        // index_add and the like want 0-d tensors on one device, too.
        return run_on_meta_tensors(op_, arguments_, meta_like);
      }
    }
    throw;
  }
}

torch::jit::Stack Call::run_on_zeros() const {
  torch::jit::Stack stack;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const bool written = is_written(op_, i);
    stack.push_back(with_tensors(arguments_[i], [&](const at::Tensor& tensor) {
      return zeros_like(tensor, written);
    }));
  }
  call_keeping_arguments(op_, &stack);
  return stack;
}

void Call::set_output_sizes(std::vector<std::vector<int64_t>> sizes) {
  output_sizes_ = std::move(sizes);
  inferred_ = true;
}

const std::vector<std::vector<int64_t>>& Call::output_sizes() {
  if (inferred_) {
    return output_sizes_;
  }
  torch::jit::Stack stack;
  try {
    stack = run_on_meta();
  } catch (const c10::NotImplementedError&) {
    if (op_.schema().name().rfind("aten::", 0) != 0) {
      throw; // it may do more than compute
    }
    stack = run_on_zeros(); // see Note [Meta kernels in Python]
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception&) {
    // A Python kernel has errors of its own words and types. The operator's
    // come before it computes, but zeros to write into would take memory.
    if (op_.schema().is_mutable()) {
      throw;
    }
    stack = run_on_zeros();
  }
  for (const auto& value : stack) {
    visit_tensors(value, [&](const at::Tensor& tensor) {
      output_sizes_.push_back(tensor.sizes().vec());
      output_strides_.push_back(tensor.strides().vec());
    });
  }
  inferred_ = true;
  return output_sizes_;
}

const std::vector<std::vector<int64_t>>& Call::output_strides() {
  output_sizes();
  return output_strides_;
}

void Call::set_output_strides(std::vector<std::vector<int64_t>> strides) {
  output_strides_ = std::move(strides);
}

} // namespace shardtensor
