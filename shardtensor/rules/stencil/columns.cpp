// The windows of an image as columns, and columns summed into an image
// (nn.Unfold and nn.Fold), where rows or columns of the image are cut, at the
// function level. What keeps images whole has a rule in rules/ops/images.cpp.
#include <ATen/div_rtn.h>
#include <ATen/native/im2col_shape_check.h>
#include <ATen/ops/col2im.h>
#include <ATen/ops/im2col.h>
#include <torch/library.h>

#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/rules/stencil/run_stencil.h"

namespace shardtensor::detail {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Dims = std::vector<int64_t>;

/// Of both, height first.
struct ColumnsCall {
  IntArrayRef kernel;
  IntArrayRef dilation;
  IntArrayRef padding;
  IntArrayRef stride;

  bool is_of_images() const {
    return kernel.size() == 2 && dilation.size() == 2 && padding.size() == 2 &&
        stride.size() == 2;
  }
  Window window(size_t i) const {
    return {kernel[i], stride[i], padding[i], dilation[i]};
  }
  int64_t count(int64_t extent, int64_t pad, size_t i) const {
    const auto reach = dilation[i] * (kernel[i] - 1) + 1;
    return div_rtn<int64_t>(extent + 2 * pad - reach, stride[i]) + 1;
  }
  PlanKey key(const Tensor& x, bool sums) const {
    PlanKey key;
    key.add(spec(x))
        .add(static_cast<int64_t>(sums))
        .add(kernel)
        .add(dilation)
        .add(padding)
        .add(stride);
    return key;
  }
};

StencilCall plan_columns(
    const Tensor& x,
    const ColumnsCall& c,
    Dims sizes, // of the result
    Stencil (*stencil)(Window, int64_t, int64_t)) {
  const auto first = x.dim() - 2;
  std::vector<Stencil> stencils;
  for (size_t i = 0; i < 2; ++i) {
    const auto dim = first + static_cast<int64_t>(i);
    stencils.push_back(stencil(c.window(i), x.size(dim), sizes[dim]));
  }
  return plan_stencil_call(
      spec(x), {first - 1}, stencils, c.padding.vec(), std::move(sizes));
}

/// What a local call pads: rows of zeros have been gathered along a cut dim.
Dims local_padding(const StencilCall& call, const ColumnsCall& c) {
  auto padding = c.padding.vec();
  for (size_t i = 0; i < 2; ++i) {
    padding[i] = call.is_cut[i] ? call.pieces[i].padding : padding[i];
  }
  return padding;
}

// ---- windows to columns -----------------------------------------------------

bool suits_windows(const Tensor& x, const ColumnsCall& c) {
  const auto dims = x.dim();
  return is_shard_tensor(x) && c.is_of_images() && (dims == 3 || dims == 4) &&
      !spec(x)->is_sharded(dims - 3) &&
      (spec(x)->is_sharded(dims - 2) || spec(x)->is_sharded(dims - 1));
}

Tensor im2col_function(
    c10::DispatchKeySet keys,
    const Tensor& x,
    IntArrayRef kernel,
    IntArrayRef dilation,
    IntArrayRef padding,
    IntArrayRef stride) {
  const ColumnsCall c{kernel, dilation, padding, stride};
  if (!suits_windows(x, c)) {
    return without_rule<at::_ops::im2col>(
        keys, x, kernel, dilation, padding, stride);
  }
  at::native::im2col_shape_check(
      x,
      Tensor(),
      kernel[0],
      kernel[1],
      dilation[0],
      dilation[1],
      padding[0],
      padding[1],
      stride[0],
      stride[1]);
  static PlanCache<StencilCall> plans;
  const auto call = plans.find(c.key(x, false), [&] {
    auto sizes = x.sizes().vec();
    const auto first = sizes.size() - 2;
    sizes[first - 1] *= kernel[0] * kernel[1];
    for (size_t i = 0; i < 2; ++i) {
      sizes[first + i] = c.count(sizes[first + i], padding[i], i);
    }
    return plan_columns(x, c, std::move(sizes), Stencil::conv);
  });
  const auto pads = local_padding(*call, c);
  const auto image = run_stencil(
      x, *call, at::MemoryFormat::Contiguous, [&](const auto& rows) {
        const Dims counts{
            c.count(rows.size(-2), pads[0], 0),
            c.count(rows.size(-1), pads[1], 1)};
        return at::im2col(rows, kernel, dilation, pads, stride)
            .unflatten(-1, counts);
      });
  return image.flatten(-2);
}

// ---- columns to an image ----------------------------------------------------

bool suits_sums(const Tensor& x, IntArrayRef image, const ColumnsCall& c) {
  const auto dims = x.dim();
  return is_shard_tensor(x) && c.is_of_images() && image.size() == 2 &&
      (dims == 2 || dims == 3) && !spec(x)->is_sharded(dims - 2) &&
      spec(x)->is_sharded(dims - 1);
}

Tensor col2im_function(
    c10::DispatchKeySet keys,
    const Tensor& x,
    IntArrayRef image,
    IntArrayRef kernel,
    IntArrayRef dilation,
    IntArrayRef padding,
    IntArrayRef stride) {
  const ColumnsCall c{kernel, dilation, padding, stride};
  if (!suits_sums(x, image, c)) {
    return without_rule<at::_ops::col2im>(
        keys,
        x,
        c10::fromIntArrayRefSlow(image),
        kernel,
        dilation,
        padding,
        stride);
  }
  at::native::col2im_shape_check(
      x,
      Tensor(),
      image[0],
      image[1],
      kernel[0],
      kernel[1],
      dilation[0],
      dilation[1],
      padding[0],
      padding[1],
      stride[0],
      stride[1]);
  const Dims counts{
      c.count(image[0], padding[0], 0), c.count(image[1], padding[1], 1)};
  const auto columns = x.unflatten(-1, counts);
  static PlanCache<StencilCall> plans;
  const auto call = plans.find(c.key(columns, true).add(image), [&] {
    auto sizes = columns.sizes().vec();
    const auto first = sizes.size() - 2;
    sizes[first - 1] /= kernel[0] * kernel[1];
    std::copy(image.begin(), image.end(), sizes.begin() + first);
    return plan_columns(columns, c, std::move(sizes), Stencil::conv_transpose);
  });
  const auto pads = local_padding(*call, c);
  return run_stencil(
      columns, *call, at::MemoryFormat::Contiguous, [&](const auto& rows) {
        auto sizes = image.vec();
        for (size_t i = 0; i < 2; ++i) {
          const auto last = rows.size(static_cast<int64_t>(i) - 2) - 1;
          sizes[i] = call->is_cut[i]
              ? last * stride[i] + c.window(i).span() - 2 * pads[i]
              : sizes[i];
        }
        return at::col2im(
            rows.flatten(-2), sizes, kernel, dilation, pads, stride);
      });
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("im2col", function_rule<at::_ops::im2col, im2col_function>);
  m.impl("col2im", function_rule<at::_ops::col2im, col2im_function>);
}

} // namespace shardtensor::detail
