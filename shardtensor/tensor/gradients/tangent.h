#pragma once

#include <initializer_list>
#include <utility>

#include <ATen/core/Tensor.h>

#include "shardtensor/comm/autograd_node.h"

namespace shardtensor::detail {

/// Whether one of these carries a forward-mode tangent.
bool has_tangent(std::initializer_list<at::Tensor> tensors);

/// Gives `result` the tangent that map(tangent of input) makes, if there is
/// one.
template <class Map>
void carry_tangent(
    const at::Tensor& result,
    const at::Tensor& input,
    const Map& map) {
  if (has_tangent({input})) {
    result._set_fw_grad(
        map(input._fw_grad(/*level=*/0)), /*level=*/0, /*is_inplace_op=*/false);
  }
}

/// Raises when a tensor carries a forward-mode tangent, which `what` ("a norm
/// of a cut dim") would drop without a word.
void check_no_tangent(const char* what, const at::Tensor& tensor);
} // namespace shardtensor::detail
