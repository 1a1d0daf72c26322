#include <ATen/ops/all.h>
#include <ATen/ops/allclose_ops.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/equal_ops.h>
#include <ATen/ops/isclose.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"

namespace shardtensor::detail {
namespace {

// Answers for the host: every rank compares its shard, then all agree.

bool equal_function(const at::Tensor& self, const at::Tensor& other) {
  common_mesh("aten::equal", {self, other});
  return self.sizes() == other.sizes() &&
      at::eq(self, other).all().item<bool>();
}

bool allclose_function(
    const at::Tensor& self,
    const at::Tensor& other,
    double rtol,
    double atol,
    bool equal_nan) {
  common_mesh("aten::allclose", {self, other});
  return at::isclose(self, other, rtol, atol, equal_nan).all().item<bool>();
}

// What PyTorch asks of a tangent: sizes, and memory, which a wrapper has none
// of. Answered without a message, in a transform, too.

bool is_same_size_function(const at::Tensor& self, const at::Tensor& other) {
  return self.sizes() == other.sizes();
}

bool has_same_storage_function(const at::Tensor&, const at::Tensor&) {
  return true;
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("is_same_size", is_same_size_function);
  m.impl("_has_same_storage_numel", has_same_storage_function);
  m.impl("equal", function_rule<at::_ops::equal, equal_function>);
  m.impl("allclose", function_rule<at::_ops::allclose, allclose_function>);
}

} // namespace shardtensor::detail
