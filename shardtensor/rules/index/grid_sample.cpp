#include <numeric>

#include <ATen/native/GridSamplerUtils.h>
#include <ATen/ops/cudnn_grid_sampler_ops.h>
#include <ATen/ops/grid_sampler_2d.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/tensor/keys.h"

// grid_sample reads each sample's image anywhere: the image is whole in its
// spatial dims, the points of the grid may be cut.

namespace shardtensor::detail {
namespace {

constexpr int64_t kSamples = 0;
constexpr int64_t kChannels = 1;

/// Labels 2, 3, ... are the dims of the grid.
struct GridLabels {
  explicit GridLabels(int64_t dims)
      : image(dims, kPrivate), grid(dims, kPrivate), output(dims) {
    image[0] = kSamples;
    image[1] = kChannels;
    grid[0] = kSamples;
    std::iota(grid.begin() + 1, grid.end() - 1, 2);
    std::iota(output.begin(), output.end(), 0);
  }

  std::vector<int64_t> image;
  std::vector<int64_t> grid;
  std::vector<int64_t> output;
};

/// Raises PyTorch's errors, before any rank looks at its piece.
void check_arguments(const Call& call) {
  const auto& image = call.operand(0).tensor;
  const auto& grid = call.operand(1).tensor;
  at::native::check_grid_sampler_common(image, grid);
  TORCH_CHECK(
      image.is_floating_point() && image.scalar_type() == grid.scalar_type(),
      call.name(),
      ": expected an image and a grid of one floating dtype, got ",
      image.scalar_type(),
      " and ",
      grid.scalar_type());
  if (call.name() == "aten::grid_sampler_2d") {
    at::native::check_grid_sampler_2d(image, grid);
  } else {
    at::native::check_grid_sampler_3d(
        image, grid, call.argument("interpolation_mode").toInt());
  }
}

Decision grid_sampler_rule(Call& call) {
  const GridLabels labels(call.operand(0).dim());
  check_arguments(call);
  const auto& image = *call.operand(0).spec;
  auto sizes = call.operand(1).spec->sizes();
  sizes.pop_back();
  sizes.insert(sizes.begin() + 1, image.size(1));
  call.set_output_sizes({std::move(sizes)});
  auto decision = rule_by_labels(
      call, {{labels.image, labels.grid}, {labels.output}}, Linearity::None);
  decision.strides_of = row_major_strides;
  return decision;
}

/// The image's gradient sums over the points of the grid, the grid's over the
/// channels: Partial where those are cut.
Decision grid_sampler_backward_rule(Call& call) {
  const GridLabels labels(call.operand(0).dim());
  Labels all{{labels.output, labels.image, labels.grid}, {}};
  std::vector<std::vector<int64_t>> sizes;
  const auto wanted = call.argument("output_mask").toBoolList();
  if (wanted[0]) {
    all.outputs.push_back(labels.image);
    sizes.push_back(call.operand(1).spec->sizes());
  }
  if (wanted[1]) {
    all.outputs.push_back(labels.grid);
    sizes.push_back(call.operand(2).spec->sizes());
  }
  call.set_output_sizes(std::move(sizes));
  return rule_by_labels(call, all, Linearity::None);
}

const RegisterRules samplers{
    {"aten::grid_sampler_2d", grid_sampler_rule},
    {"aten::grid_sampler_2d_backward", grid_sampler_backward_rule},
    {"aten::grid_sampler_3d", grid_sampler_rule},
    {"aten::grid_sampler_3d_backward", grid_sampler_backward_rule},
};

/// What PyTorch asks cuDNN for on a GPU, which takes no empty piece: bilinear,
/// zeros outside, corners aligned.
at::Tensor cudnn_grid_sampler_function(
    const at::Tensor& image,
    const at::Tensor& grid) {
  return at::grid_sampler_2d(
      image,
      grid,
      static_cast<int64_t>(at::native::GridSamplerInterpolation::Bilinear),
      static_cast<int64_t>(at::native::GridSamplerPadding::Zeros),
      /*align_corners=*/true);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "cudnn_grid_sampler",
      function_rule<at::_ops::cudnn_grid_sampler, cudnn_grid_sampler_function>);
}

} // namespace shardtensor::detail
