#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rrelu_with_noise.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/rules/random/counter_numbers.h"
#include "shardtensor/rules/random/random_whole.h"
#include "shardtensor/tensor/random.h"

namespace shardtensor::detail {
namespace {

/// Elements in the order of one device.
struct Numbered {
  at::Tensor before; // how many of the chosen stand before each element
  int64_t count; // of the chosen on all ranks
};

/// `counts` along dim: what stands before each row, and the sum over the dim.
/// Communication: one all-reduce where the dim is cut.
std::pair<at::Tensor, at::Tensor> count_along(
    const at::Tensor& counts,
    int64_t dim,
    const ShardSpec& spec) {
  const auto before = counts.cumsum(dim) - counts;
  const auto own = counts.sum(dim);
  if (!spec.is_sharded(dim)) {
    return {before, own};
  }
  const auto piece = spec.piece(dim, spec.mesh()->position());
  auto sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), spec.partition(dim).pieces());
  auto pieces = at::zeros(sizes, own.options());
  pieces.select(0, piece).copy_(own);
  const auto all =
      all_reduce(pieces, Reduce::Sum, *spec.mesh(), spec.axes(dim));
  return {before + all.narrow(0, 0, piece).sum(0).unsqueeze(dim), all.sum(0)};
}

Numbered number_elements(const at::Tensor& chosen, const ShardSpec& spec) {
  auto counts = chosen.to(at::kLong);
  auto before = at::zeros_like(counts);
  for (int64_t dim = chosen.dim() - 1; dim >= 0; --dim) {
    auto [rows, total] = count_along(counts, dim, spec);
    for (int64_t inner = dim + 1; inner < chosen.dim(); ++inner) {
      rows = rows.unsqueeze(-1);
    }
    before += rows;
    counts = total;
  }
  return {before, counts.item<int64_t>()};
}

/// What each element of x is multiplied with, in the type of the product. One
/// device takes a number for every element that is not positive: ranks tell
/// each other how many come before theirs.
at::Tensor rrelu_slopes(
    const Local& x,
    const at::Scalar& lower,
    const at::Scalar& upper,
    const std::optional<at::Generator>& generator) {
  const auto negative = x.tensor.le(0);
  const auto type = at::toOpMathType(x.tensor.scalar_type());
  const auto options = x.tensor.options().dtype(type);
  auto slopes = at::ones(x.tensor.sizes(), options);
  if (random_policy() == RandomPolicy::Counter) {
    const auto noise = counter_numbers(
        x.tensor.sizes(),
        type,
        draw_key(x.tensor, generator),
        {Distribution::Kind::Uniform, lower.toDouble(), upper.toDouble()},
        global_index(*x.spec));
    return at::where(negative, noise, slopes);
  }
  note_whole_draw("aten::rrelu_with_noise", x.tensor, *x.spec);
  if (!x.tensor.is_cpu()) {
    // A number of x's type for every element, whatever its value.
    const auto whole = at::full(x.spec->sizes(), -1, x.tensor.options());
    auto noise = at::empty_like(whole);
    at::rrelu_with_noise(whole, noise, lower, upper, true, generator);
    return at::where(negative, own_part(noise, x.spec).to(type), slopes);
  }
  // A number for every element that is not positive, one after the other.
  const auto numbered = number_elements(negative, *x.spec);
  const auto drawn = at::empty({numbered.count}, options.dtype(at::kDouble))
                         .uniform_(
                             at::ones({}, options).mul_(lower).item<double>(),
                             at::ones({}, options).mul_(upper).item<double>(),
                             generator)
                         .to(type);
  return slopes.masked_scatter_(
      negative, drawn.index_select(0, numbered.before.masked_select(negative)));
}

struct Rectified {
  at::Tensor output;
  at::Tensor noise;
};

Rectified rrelu(
    const at::Tensor& self,
    const at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    const std::optional<at::Generator>& generator) {
  const CommScope scope("aten::rrelu_with_noise");
  if (!training) {
    const auto slope = (lower.toDouble() + upper.toDouble()) / 2;
    return {at::leaky_relu(self, slope).contiguous(), noise}; // as one device
  }
  check_generators("aten::rrelu_with_noise", generator, self);
  const auto x = local_of(self, contiguous(without_partial(spec(self))));
  const auto slopes = rrelu_slopes(x, lower, upper, generator);
  const auto dtype = self.scalar_type();
  return {
      wrap(x.tensor.to(slopes.scalar_type()).mul(slopes).to(dtype), x.spec),
      wrap(slopes.to(dtype), x.spec)};
}

at::Tensor rrelu_kernel(
    const at::Tensor& self,
    at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  const auto result = rrelu(self, noise, lower, upper, training, generator);
  noise.copy_(result.noise);
  return result.output;
}

at::Tensor& rrelu_in_place_kernel(
    at::Tensor& self,
    at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  return self.copy_(
      rrelu_kernel(self, noise, lower, upper, training, generator));
}

std::tuple<at::Tensor, at::Tensor> rrelu_functional_kernel(
    const at::Tensor& self,
    const at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  const auto result = rrelu(self, noise, lower, upper, training, generator);
  return {result.output, result.noise};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("rrelu_with_noise", rrelu_kernel);
  m.impl("rrelu_with_noise_", rrelu_in_place_kernel);
  m.impl("rrelu_with_noise_functional", rrelu_functional_kernel);
}

} // namespace shardtensor::detail
