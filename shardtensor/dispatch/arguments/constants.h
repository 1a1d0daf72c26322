#pragma once

#include <memory>
#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>

#include "shardtensor/tensor/constant.h"
#include "shardtensor/tensor/known_zeros.h"

namespace shardtensor::detail {

/// Whether the call writes into a constant that has no memory yet, for
/// ConstantsOfCall leaves the layout to its result.
bool writes_constant(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack);

/// What a call at the function level means for the constants among its
/// arguments, see Note [Constants]: those that it writes get their memory
/// before, and know what stays zero after; its results know that they are views
/// of the others. Likewise for what its arguments know of their zeros.
class ConstantsOfCall {
 public:
  ConstantsOfCall(
      const c10::OperatorHandle& op,
      const torch::jit::Stack& stack);
  /// With the results on the stack.
  void finish(const torch::jit::Stack& stack) const;

 private:
  const c10::OperatorHandle& op_;
  size_t viewed_ = 0; // an argument
  torch::jit::Stack arguments_; // none: no view of a constant
  std::shared_ptr<const ConstantView> begun_; // its first write is this one
  std::optional<ZerosBesideWrite> still_zero_; // a later one
  std::optional<Box> sum_; // outside of it the result is zero
};

} // namespace shardtensor::detail
