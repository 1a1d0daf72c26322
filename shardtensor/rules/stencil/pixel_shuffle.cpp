// Pixel shuffling at the function level: each output block belongs to one
// input pixel, so cut points are multiplied or divided.
#include <ATen/core/Tensor.h>
#include <ATen/ops/pixel_shuffle_ops.h>
#include <ATen/ops/pixel_unshuffle_ops.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/stencil/run_stencil.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

/// On the CPU PyTorch returns a tensor without elements unshuffled as it is:
/// its sizes cannot be inferred from one.
std::vector<int64_t> shuffled_sizes(
    std::vector<int64_t> sizes,
    bool up,
    int64_t factor) {
  auto* last = &sizes.back();
  last[-2] = up ? last[-2] / (factor * factor) : last[-2] * factor * factor;
  for (const int i : {-1, 0}) {
    last[i] = up ? last[i] * factor : last[i] / factor;
  }
  return sizes;
}

using PlainShuffle = Tensor (*)(const Tensor&, int64_t);

StencilCall plan_shuffle(
    const char* op,
    PlainShuffle plain,
    bool up,
    const Tensor& x,
    int64_t factor) {
  infer_sizes(op, x, 2, [&](const Tensor& t) { return plain(t, factor); });
  const auto sizes = shuffled_sizes(x.sizes().vec(), up, factor);
  const Window blocks{factor, factor, 0, 1};
  std::vector<Stencil> stencils;
  for (int64_t dim = x.dim() - 2; dim < x.dim(); ++dim) {
    stencils.push_back(
        up ? Stencil::conv_transpose(blocks, x.size(dim), sizes[dim])
           : Stencil::conv(blocks, x.size(dim), sizes[dim]));
  }
  return plan_stencil_call(spec(x), {x.dim() - 3}, stencils, {0, 0}, sizes);
}

template <class Op, bool up>
Tensor shuffle_function(const Tensor& x, int64_t factor) {
  if (!up && x.is_cpu() && x.dim() > 2 && x.numel() == 0) {
    // As PyTorch's kernel of the CPU has it.
    infer_sizes(
        Op::name, x, 2, [&](const Tensor& t) { return Op::call(t, factor); });
    return x.clone();
  }
  static PlanCache<StencilCall> plans;
  PlanKey key;
  key.add(spec(x)).add(factor);
  const auto call = plans.find(
      key, [&] { return plan_shuffle(Op::name, Op::call, up, x, factor); });
  return run_stencil(x, *call, format_on(x), [&](const Tensor& rows) {
    return Op::call(rows, factor);
  });
}

template <class Op, bool up>
constexpr auto shuffle = function_rule<Op, shuffle_function<Op, up>>;

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("pixel_shuffle", shuffle<at::_ops::pixel_shuffle, true>);
  m.impl("pixel_unshuffle", shuffle<at::_ops::pixel_unshuffle, false>);
}

} // namespace shardtensor::detail
