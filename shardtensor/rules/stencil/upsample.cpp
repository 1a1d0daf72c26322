#include "shardtensor/rules/stencil/upsample.h"

#include <ATen/ops/_upsample_bicubic2d_aa.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/_upsample_nearest_exact1d.h>
#include <ATen/ops/_upsample_nearest_exact2d.h>
#include <ATen/ops/_upsample_nearest_exact3d.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bicubic2d_backward.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_bilinear2d_backward.h>
#include <ATen/ops/upsample_linear1d.h>
#include <ATen/ops/upsample_linear1d_backward.h>
#include <ATen/ops/upsample_nearest1d.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <ATen/ops/upsample_nearest3d.h>
#include <ATen/ops/upsample_trilinear3d.h>
#include <ATen/ops/upsample_trilinear3d_backward.h>
#include <c10/util/Exception.h>

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Mode = Resample::Mode;

Tensor plain_nearest(const Upsample& u, const Tensor& x) {
  const auto& s = u.scales;
  switch (u.dims()) {
    case 1:
      return at::upsample_nearest1d(x, u.size, s[0]);
    case 2:
      return at::upsample_nearest2d(x, u.size, s[0], s[1]);
    default:
      return at::upsample_nearest3d(x, u.size, s[0], s[1], s[2]);
  }
}

Tensor plain_nearest_exact(const Upsample& u, const Tensor& x) {
  const auto& s = u.scales;
  switch (u.dims()) {
    case 1:
      return at::_upsample_nearest_exact1d(x, u.size, s[0]);
    case 2:
      return at::_upsample_nearest_exact2d(x, u.size, s[0], s[1]);
    default:
      return at::_upsample_nearest_exact3d(x, u.size, s[0], s[1], s[2]);
  }
}

Tensor plain_linear(const Upsample& u, const Tensor& x) {
  const auto& s = u.scales;
  const bool corners = u.align_corners;
  switch (u.dims()) {
    case 1:
      return at::upsample_linear1d(x, u.size, corners, s[0]);
    case 2:
      return at::upsample_bilinear2d(x, u.size, corners, s[0], s[1]);
    default:
      return at::upsample_trilinear3d(x, u.size, corners, s[0], s[1], s[2]);
  }
}

/// PyTorch has these for images alone.
Tensor plain_antialias(const Upsample& u, const Tensor& x) {
  const auto& s = u.scales;
  const bool corners = u.align_corners;
  if (u.dims() == 1) {
    auto image = u; // of one row, see Note [Images one column wide]
    image.size.insert(image.size.begin(), 1);
    image.scales.insert(image.scales.begin(), std::nullopt);
    return plain_antialias(image, x.unsqueeze(-2)).squeeze(-2);
  }
  if (x.is_cuda() && x.size(0) * x.size(1) == 0) { // no kernel launches that
    return at::upsample_bilinear2d(x, u.size, corners, s[0], s[1]);
  }
  return u.mode == Mode::LinearAntialias
      ? at::_upsample_bilinear2d_aa(x, u.size, corners, s[0], s[1])
      : at::_upsample_bicubic2d_aa(x, u.size, corners, s[0], s[1]);
}

} // namespace

Tensor plain_upsample(const Upsample& u, const Tensor& x) {
  switch (u.mode) {
    case Mode::Nearest:
      return plain_nearest(u, x);
    case Mode::NearestExact:
      return plain_nearest_exact(u, x);
    case Mode::Linear:
      return plain_linear(u, x);
    case Mode::Cubic:
      return at::upsample_bicubic2d(
          x, u.size, u.align_corners, u.scales[0], u.scales[1]);
    case Mode::LinearAntialias:
    case Mode::CubicAntialias:
      return plain_antialias(u, x);
  }
  TORCH_INTERNAL_ASSERT(false);
}

Tensor plain_upsample_backward(
    const Upsample& u,
    const Tensor& grad,
    at::IntArrayRef input) {
  const auto& s = u.scales;
  const bool corners = u.align_corners;
  if (u.mode == Mode::Cubic) {
    return at::upsample_bicubic2d_backward(
        grad, u.size, input, corners, s[0], s[1]);
  }
  TORCH_INTERNAL_ASSERT(u.mode == Mode::Linear);
  switch (u.dims()) {
    case 1:
      return at::upsample_linear1d_backward(grad, u.size, input, corners, s[0]);
    case 2:
      return at::upsample_bilinear2d_backward(
          grad, u.size, input, corners, s[0], s[1]);
    default:
      return at::upsample_trilinear3d_backward(
          grad, u.size, input, corners, s[0], s[1], s[2]);
  }
}

} // namespace shardtensor::detail
