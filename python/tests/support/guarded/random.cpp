#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

// Random numbers that CUDA draws in another way than the CPU.

namespace guarded {
namespace {

using at::Tensor;

/// A number for every element, whatever its value. Row-major, whatever self is.
Tensor rrelu(
    const Tensor& self,
    Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  if (!training) {
    const auto slope = (lower.toDouble() + upper.toDouble()) / 2;
    return at::leaky_relu(self, slope).contiguous();
  }
  const auto type = at::toOpMathType(self.scalar_type());
  // Numbers from 0 to 1 are of self's type already, and the slopes again.
  const auto drawn = at::empty(self.sizes(), self.options().dtype(type))
                         .uniform_(0, 1, generator)
                         .to(self.scalar_type())
                         .to(at::kDouble)
                         .mul(upper.toDouble() - lower.toDouble())
                         .add(lower)
                         .to(self.scalar_type());
  const auto slopes = at::where(self.le(0), drawn.to(type), 1.0);
  noise.copy_(slopes);
  return self.contiguous().to(type).mul(slopes).to(self.scalar_type());
}

Tensor& rrelu_in_place(
    Tensor& self,
    Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  return self.copy_(rrelu(self, noise, lower, upper, training, generator));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("rrelu_with_noise", rrelu);
  m.impl("rrelu_with_noise_", rrelu_in_place);
}

} // namespace
} // namespace guarded
