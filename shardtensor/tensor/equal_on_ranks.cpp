#include "shardtensor/tensor/equal_on_ranks.h"

#include <limits>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>

#include "shardtensor/comm/primitives/all_reduce.h"

namespace shardtensor::detail {
namespace {

at::ScalarType integer_of(int64_t bytes) {
  return bytes == 1 ? at::kByte
      : bytes == 2  ? at::kShort
      : bytes == 4  ? at::kInt
                    : at::kLong;
}

/// Numbers of which the largest and the smallest of all ranks differ where the
/// elements do.
at::Tensor comparable(const at::Tensor& tensor) {
  const auto plain = tensor.resolve_conj().resolve_neg().contiguous();
  const auto real = plain.is_complex() ? at::view_as_real(plain) : plain;
  if (!real.is_floating_point()) {
    return real.to(at::kLong);
  }
  if (real.is_cpu()) {
    return real.view(integer_of(real.element_size())).to(at::kLong);
  }
  constexpr auto kInfinity = std::numeric_limits<double>::infinity();
  const auto value = real.to(at::kDouble);
  return at::stack(
      {value.nan_to_num(0.0, kInfinity, -kInfinity),
       value.isnan().to(at::kDouble)});
}

bool is_same(const at::Tensor& highest, const at::Tensor& lowest) {
  // See Note [Equal on devices].
  return highest.is_floating_point() ? highest.allclose(lowest, 1e-3, 1e-6)
                                     : highest.equal(lowest);
}

} // namespace

bool differs_along(
    const at::Tensor& tensor,
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  const at::NoGradGuard no_grad;
  const auto value = comparable(tensor.detach());
  const bool differs = !is_same(
      all_reduce(value, Reduce::Max, mesh, axes),
      all_reduce(value, Reduce::Min, mesh, axes));
  if (static_cast<int64_t>(axes.size()) == mesh.axes()) {
    return differs;
  }
  const auto anywhere = at::full(
      {}, static_cast<int64_t>(differs), value.options().dtype(at::kLong));
  return all_reduce(anywhere, Reduce::Max, mesh.group()).item<int64_t>() != 0;
}

} // namespace shardtensor::detail
