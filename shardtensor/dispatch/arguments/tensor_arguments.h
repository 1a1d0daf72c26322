#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace shardtensor::detail {

// The tensors in a boxed call's arguments, lists included.

/// Whether an operator writes into its argument: in-place or out=.
inline bool is_written(const c10::OperatorHandle& op, size_t argument) {
  const auto* alias = op.schema().arguments()[argument].alias_info();
  return alias && alias->isWrite();
}

/// Calls visit(tensor) for every defined tensor in an argument.
template <class Visit>
void visit_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) {
        visit(tensor);
      }
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor> tensor :
         value.toOptionalTensorList()) {
      if (tensor && tensor->defined()) {
        visit(*tensor);
      }
    }
  }
}

/// Every defined tensor in an argument.
inline std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  visit_tensors(
      value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}
/// The same of several.
inline std::vector<at::Tensor> all_tensors_in(
    at::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : values) {
    for (auto& tensor : tensors_in(value)) {
      tensors.push_back(std::move(tensor));
    }
  }
  return tensors;
}

/// The argument with every tensor replaced by make(tensor).
template <class Make>
c10::IValue with_tensors(const c10::IValue& value, const Make& make) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? make(value.toTensor()) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? make(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor :
         value.toOptionalTensorList()) {
      list.push_back(tensor && tensor->defined() ? make(*tensor) : tensor);
    }
    return list;
  }
  return value;
}

} // namespace shardtensor::detail
