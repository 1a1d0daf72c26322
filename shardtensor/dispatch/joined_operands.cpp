#include "shardtensor/dispatch/joined_operands.h"

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/List.h>

#include "shardtensor/tensor/dtensor.h"

namespace shardtensor {
namespace {

/// The argument as rules may know of it: one that is not written may be moved.
at::Tensor readable(const at::Tensor& tensor, bool written) {
  return !written && is_dtensor(tensor) ? with_plain_layout(tensor) : tensor;
}

bool is_joined(const at::Tensor& tensor) {
  return is_shard_tensor(tensor) || is_dtensor(tensor);
}

/// The tensors of an argument, undefined ones for what is absent.
std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) {
    return {value.toTensor()};
  }
  if (value.isTensorList()) {
    return value.toTensorVector();
  }
  std::vector<at::Tensor> tensors;
  if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> tensor :
         value.toOptionalTensorList()) {
      tensors.push_back(tensor ? *tensor : at::Tensor());
    }
  }
  return tensors;
}

/// The argument with other tensors, in the order of tensors_in.
c10::IValue with_tensors(
    const c10::IValue& value,
    std::vector<at::Tensor> tensors) {
  if (value.isTensor()) {
    return tensors[0];
  }
  if (value.isTensorList()) {
    return c10::List<at::Tensor>(tensors);
  }
  c10::List<std::optional<at::Tensor>> list;
  for (auto& tensor : tensors) {
    list.push_back(
        tensor.defined() ? std::make_optional(tensor) : std::nullopt);
  }
  return list;
}

MeshPtr mesh_of(const at::Tensor& tensor) {
  return is_shard_tensor(tensor) ? spec(tensor)->mesh()
                                 : dtensor_spec(tensor)->mesh();
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

/// The arguments of a call, made ShardTensors of one mesh and back.
class Join {
 public:
  Join(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments)
      : op_(op), name_(c10::toString(op.operator_name())) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool written = is_written(op.schema().arguments()[i]);
      given_.push_back(tensors_in(arguments[i]));
      for (auto& tensor : given_.back()) {
        tensor = readable(tensor, written);
        if (is_joined(tensor)) {
          const auto own = mesh_of(tensor);
          mesh_ = mesh_ ? joint_mesh(name_.c_str(), mesh_, own) : own;
        }
      }
    }
  }

  /// Replaces the arguments, and remembers what will be written.
  void enter(c10::IValue* arguments) {
    for (size_t i = 0; i < given_.size(); ++i) {
      auto tensors = given_[i];
      const bool written = is_written(op_.schema().arguments()[i]);
      for (auto& tensor : tensors) {
        tensor = joined(tensor, written);
      }
      if (tensors.size() > 0) {
        arguments[i] = with_tensors(arguments[i], tensors);
      }
      joined_.push_back(std::move(tensors));
    }
  }

  /// Brings back what was written, to the caller's tensors.
  void leave() const {
    for (size_t i = 0; i < given_.size(); ++i) {
      for (size_t j = 0; j < given_[i].size(); ++j) {
        if (is_taken(i, j)) {
          given_[i][j].copy_(returned_as(joined_[i][j], given_[i][j]));
        }
      }
    }
  }

  /// The caller's own tensor where an operator returns an argument.
  c10::IValue result(const c10::IValue& value) const {
    auto tensors = tensors_in(value);
    for (auto& tensor : tensors) {
      tensor = given(tensor);
    }
    return tensors.empty() ? value : with_tensors(value, std::move(tensors));
  }

 private:
  at::Tensor joined(const at::Tensor& tensor, bool written) const {
    if (!is_joined(tensor)) {
      return tensor;
    }
    const auto result = is_dtensor(tensor) ? from_dtensor(tensor, mesh_)
                                           : on_mesh(tensor, mesh_);
    // What is written goes back as a whole, with its history.
    return written && !result.is_same(tensor) ? result.clone() : result;
  }

  at::Tensor given(const at::Tensor& result) const {
    for (size_t i = 0; i < given_.size(); ++i) {
      for (size_t j = 0; j < given_[i].size(); ++j) {
        if (is_taken(i, j) && result.is_same(joined_[i][j])) {
          return given_[i][j];
        }
      }
    }
    return result;
  }

  /// Whether this argument is written, and not the caller's own tensor.
  bool is_taken(size_t i, size_t j) const {
    return is_written(op_.schema().arguments()[i]) && is_joined(given_[i][j]) &&
        !joined_[i][j].is_same(given_[i][j]);
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  MeshPtr mesh_;
  std::vector<std::vector<at::Tensor>> given_; // by argument
  std::vector<std::vector<at::Tensor>> joined_;
};

} // namespace

void Joinable::see(const c10::IValue& value) {
  if (value.isTensor()) {
    see(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const auto& tensor : tensors_in(value)) {
      see(tensor);
    }
  }
}

bool Joinable::is_foreign(const at::Tensor& tensor) {
  return is_dtensor(tensor);
}

bool must_join(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    const torch::jit::Stack& stack) {
  Joinable joinable(keys);
  for (const auto& value :
       torch::jit::last(stack, op.schema().arguments().size())) {
    joinable.see(value);
  }
  return joinable.found();
}

void run_joined(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto count = op.schema().arguments().size();
  const auto base = stack->size() - count;
  Join join(op, torch::jit::last(*stack, count));
  join.enter(stack->data() + base);
  op.callBoxed(stack);
  join.leave();
  for (size_t i = base; i < stack->size(); ++i) {
    (*stack)[i] = join.result((*stack)[i]);
  }
}

} // namespace shardtensor
