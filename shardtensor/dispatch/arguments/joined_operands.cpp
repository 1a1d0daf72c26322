#include "shardtensor/dispatch/arguments/joined_operands.h"

#include <string>
#include <vector>

#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/tensor/dtensor.h"

namespace shardtensor {

using namespace detail;
namespace {

/// The argument as rules may know of it: one that is not written may be moved.
at::Tensor readable(const at::Tensor& tensor, bool written) {
  return !written && is_dtensor(tensor) ? with_plain_layout(tensor) : tensor;
}

bool is_joined(const at::Tensor& tensor) {
  return is_shard_tensor(tensor) || is_dtensor(tensor);
}

MeshPtr mesh_of(const at::Tensor& tensor) {
  return is_shard_tensor(tensor) ? spec(tensor)->mesh()
                                 : dtensor_spec(tensor)->mesh();
}

/// The arguments of a call, made ShardTensors of one mesh and back.
class Join {
 public:
  Join(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments)
      : op_(op), name_(c10::toString(op.operator_name())) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const bool written = is_written(op, i);
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
      auto& tensors = joined_.emplace_back();
      arguments[i] = with_tensors(arguments[i], [&](const at::Tensor&) {
        const auto& own = given_[i][tensors.size()];
        return tensors.emplace_back(joined(own, is_written(op_, i)));
      });
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
    return with_tensors(
        value, [&](const at::Tensor& tensor) { return given(tensor); });
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
    return is_written(op_, i) && is_joined(given_[i][j]) &&
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
  visit_tensors(value, [&](const at::Tensor& tensor) { see(tensor); });
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
