#include <algorithm>
#include <vector>

#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_fft_c2c.h>
#include <ATen/ops/_fft_c2r.h>
#include <ATen/ops/_fft_r2c.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/traced_messages.h"
#include "shardtensor/layout/view_plan.h"
#include "shardtensor/tensor/redistribute.h"

// Fourier transforms below autograd; ATen's derivative formulas run above.
//
// A transform along several dims is done dim by dim. Where the data is, those
// that are whole; then the cut ones are made whole, which cuts another dim: a
// batch dim, or one that is done. So each rank keeps its share of the memory,
// and each cut dim costs one exchange.

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Dims = std::vector<int64_t>;

Dims wrapped(at::IntArrayRef dims, int64_t count) {
  Dims result;
  for (const int64_t dim : dims) {
    result.push_back(at::maybe_wrap_dim(dim, count));
  }
  return result;
}

/// The layout with `dims` whole; what cuts them may cut any dim but `kept`.
SpecPtr whole_but(const SpecPtr& spec, const Dims& dims, const Dims& kept) {
  Dims others;
  for (int64_t dim = 0; dim < spec->dim(); ++dim) {
    const auto is_in = [&](const Dims& list) {
      return std::find(list.begin(), list.end(), dim) != list.end();
    };
    if (!is_in(dims) && !is_in(kept)) {
      others.push_back(dim);
    }
  }
  return whole_dims(spec, dims, others);
}

bool loses_cuts(const SpecPtr& from, const SpecPtr& to) {
  return to->sharded_axes().size() < from->sharded_axes().size();
}

/// x with `dims` whole. Another dim is cut for it: never one of `kept`, and one
/// of `later` only where there is no other. Where there is none at all every
/// rank gets the rows: counted as a fallback.
Local with_whole(
    const char* op,
    const Local& x,
    const Dims& dims,
    const Dims& kept,
    Dims later = {}) {
  later.insert(later.end(), kept.begin(), kept.end());
  auto wanted = whole_but(x.spec, dims, later);
  if (loses_cuts(x.spec, wanted)) {
    wanted = whole_but(x.spec, dims, kept);
  }
  if (loses_cuts(x.spec, wanted)) {
    note_fallback(op, x.spec, wanted);
  }
  return {redistribute_local(x.tensor, x.spec, wanted), wanted};
}

/// The local transform that makes x a tensor of `dtype` laid out as `spec`;
/// PyTorch's own does not take an empty shard.
template <class Transform>
Local transformed(
    const Local& x,
    const SpecPtr& spec,
    at::ScalarType dtype,
    const Transform& transform) {
  const auto own = x.spec->local_sizes();
  if (std::find(own.begin(), own.end(), 0) != own.end()) {
    const auto none =
        at::empty(spec->local_sizes(), x.tensor.options().dtype(dtype));
    return {needing(none, x.tensor), spec};
  }
  return {transform(x.tensor), spec};
}

SpecPtr with_extent(const SpecPtr& spec, int64_t dim, int64_t extent) {
  auto sizes = spec->sizes();
  sizes[dim] = extent;
  return with_sizes(spec, std::move(sizes));
}

/// Complex to complex along `dims`; no dim of `kept` gets cut.
Local along_dims(
    const char* op,
    Local x,
    Dims dims,
    const Dims& kept,
    int64_t normalization,
    bool forward) {
  while (!dims.empty()) {
    Dims whole;
    Dims cut;
    for (const int64_t dim : dims) {
      (x.spec->is_sharded(dim) ? cut : whole).push_back(dim);
    }
    if (!whole.empty()) {
      x = transformed(
          x, x.spec, x.tensor.scalar_type(), [&](const Tensor& local) {
            return at::_fft_c2c(local, whole, normalization, forward);
          });
    }
    if (!cut.empty()) {
      x = with_whole(op, x, cut, kept);
    }
    dims = std::move(cut);
  }
  return x;
}

Tensor fft_c2c_kernel(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    bool forward) {
  constexpr auto op = "aten::_fft_c2c";
  const CommScope scope(op);
  const auto result = along_dims(
      op, local_of(self), wrapped(dim, self.dim()), {}, normalization, forward);
  return wrap(result.tensor, result.spec);
}

/// The last dim first: the others are complex then.
Tensor fft_r2c_kernel(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    bool onesided) {
  constexpr auto op = "aten::_fft_r2c";
  const CommScope scope(op);
  auto dims = wrapped(dim, self.dim());
  const auto last = dims.back();
  dims.pop_back();
  const auto x = with_whole(op, local_of(self), {last}, {}, dims);
  const auto extent = x.spec->size(last);
  const auto lines = transformed(
      x,
      with_extent(x.spec, last, onesided ? extent / 2 + 1 : extent),
      c10::toComplexType(self.scalar_type()),
      [&](const Tensor& local) {
        return at::_fft_r2c(local, last, normalization, onesided);
      });
  const auto result = along_dims(op, lines, dims, {}, normalization, true);
  return wrap(result.tensor, result.spec);
}

/// The last dim last: lines are those of a real signal then.
Tensor fft_c2r_kernel(
    const Tensor& self,
    at::IntArrayRef dim,
    int64_t normalization,
    int64_t last_dim_size) {
  constexpr auto op = "aten::_fft_c2r";
  const CommScope scope(op);
  auto dims = wrapped(dim, self.dim());
  const auto last = dims.back();
  dims.pop_back();
  auto x = along_dims(op, local_of(self), dims, {last}, normalization, false);
  x = with_whole(op, x, {last}, {});
  const auto result = transformed(
      x,
      with_extent(x.spec, last, last_dim_size),
      c10::toRealValueType(self.scalar_type()),
      [&](const Tensor& local) {
        return at::_fft_c2r(local, last, normalization, last_dim_size);
      });
  return wrap(result.tensor, result.spec);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("_fft_c2c", fft_c2c_kernel);
  m.impl("_fft_r2c", fft_r2c_kernel);
  m.impl("_fft_c2r", fft_c2r_kernel);
}

} // namespace shardtensor::detail
