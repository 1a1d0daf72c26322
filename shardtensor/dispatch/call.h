#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Scalar.h>
#include <c10/util/SmallVector.h>

#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor {

/// One tensor among the arguments of a call, in argument order; the elements of
/// a tensor list one after the other.
struct Operand {
  size_t argument; // its place in the schema
  at::Tensor tensor;
  SpecPtr spec; // null: a plain 0-d tensor, the same on all ranks
  bool written = false; // an in-place or out= argument

  int64_t dim() const {
    return spec ? spec->dim() : 0;
  }
};

/// What a factor or a divisor does to terms that wait to be added.
enum class FactorKind : uint8_t { Unknown, Ordinary, Zero, NotFinite };
FactorKind factor_kind(const at::Scalar& number);
/// Unknown but for a number that stands in the program, which alone can be read
/// without waiting for a device and is the same while a compiler traces.
FactorKind factor_kind(const Operand& operand);

/// An operator call below autograd, as a rule sees it. At least one operand
/// has a spec; plain operands with dims count as Replicate.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  const c10::OperatorHandle& op() const {
    return op_;
  }
  /// "aten::add.Tensor".
  std::string name() const;
  const MeshPtr& mesh() const {
    return mesh_;
  }
  const c10::SmallVector<Operand, 4>& operands() const {
    return operands_;
  }
  const Operand& operand(size_t index) const {
    return operands_[index];
  }
  size_t arguments() const {
    return arguments_.size();
  }
  const c10::IValue& argument(size_t index) const {
    return arguments_[index];
  }
  /// Raises when the schema has no such argument.
  const c10::IValue& argument(const char* name) const;
  size_t argument_index(const char* name) const;
  bool has_argument(const char* name) const;

  /// The global sizes of the tensor outputs, one after the other: those that
  /// were set, or by running the operator on meta tensors of the global sizes;
  /// without a Meta kernel on zeros (PyTorch's operators). PyTorch's own shape
  /// errors come from here, with global sizes, the same on every rank.
  const std::vector<std::vector<int64_t>>& output_sizes();
  /// For a rule that knows the sizes and has checked the arguments.
  void set_output_sizes(std::vector<std::vector<int64_t>> sizes);
  /// Their strides, of which the same holds; none where sizes alone were set.
  const std::vector<std::vector<int64_t>>& output_strides();
  void set_output_strides(std::vector<std::vector<int64_t>> strides);

 private:
  torch::jit::Stack run_on_meta() const;
  torch::jit::Stack run_on_zeros() const;

  const c10::OperatorHandle& op_;
  at::ArrayRef<c10::IValue> arguments_;
  c10::SmallVector<Operand, 4> operands_;
  MeshPtr mesh_;
  std::vector<std::vector<int64_t>> output_sizes_;
  std::vector<std::vector<int64_t>> output_strides_;
  bool inferred_ = false;
};

} // namespace shardtensor
