// Pixel shuffling at the function level: each output block belongs to one
// input pixel, so cut points are multiplied or divided.
#include <ATen/ops/pixel_shuffle.h>
#include <ATen/ops/pixel_unshuffle.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/rules/stencil/run_stencil.h"

namespace shardtensor {
namespace {

using at::Tensor;
using PlainShuffle = Tensor (*)(const Tensor&, int64_t);

struct ShufflePlan {
  StencilCall call;
};

/// PyTorch returns a tensor without elements unshuffled as it is: its sizes
/// cannot be inferred from one.
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

Tensor shuffle_rule(
    const char* op,
    PlainShuffle plain,
    bool up,
    const Tensor& x,
    int64_t factor) {
  if (is_transformed({x})) {
    BelowFunctionLevel below;
    return plain(x, factor);
  }
  CommScope scope(op);
  static PlanCache<ShufflePlan> plans;
  PlanKey key;
  key.add(spec(x)).add(factor).add(static_cast<int64_t>(up));
  const auto plan = plans.find(key, [&] {
    infer_sizes(op, x, 2, [&](const Tensor& t) { return plain(t, factor); });
    const auto sizes = shuffled_sizes(x.sizes().vec(), up, factor);
    const Window blocks{factor, factor, 0, 1};
    std::vector<Stencil> stencils;
    for (int64_t dim = x.dim() - 2; dim < x.dim(); ++dim) {
      stencils.push_back(
          up ? Stencil::conv_transpose(blocks, x.size(dim), sizes[dim])
             : Stencil::conv(blocks, x.size(dim), sizes[dim]));
    }
    return ShufflePlan{
        plan_stencil_call(spec(x), {x.dim() - 3}, stencils, {0, 0}, sizes)};
  });
  return run_stencil(
      x, plan->call, [&](const Tensor& rows) { return plain(rows, factor); });
}

Tensor pixel_shuffle_rule(const Tensor& x, int64_t factor) {
  return shuffle_rule(
      "aten::pixel_shuffle",
      at::pixel_shuffle,
      /*up=*/true,
      x,
      factor);
}

Tensor pixel_unshuffle_rule(const Tensor& x, int64_t factor) {
  return shuffle_rule(
      "aten::pixel_unshuffle", at::pixel_unshuffle, /*up=*/false, x, factor);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("pixel_shuffle", pixel_shuffle_rule);
  m.impl("pixel_unshuffle", pixel_unshuffle_rule);
}

} // namespace shardtensor
