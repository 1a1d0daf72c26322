#include "shardtensor/points/curve.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <ATen/Dispatch.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>

#include "shardtensor/threads/parallel_for.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kMostDims = 8;
constexpr int64_t kGrain = 4096;

using Cell = std::array<uint32_t, kMostDims>;

/// J. Skilling, "Programming the Hilbert curve" (2004): a cell's coordinates
/// become the bits of its place, dim by dim.
void to_transposed_place(Cell& x, int64_t dims, int64_t bits) {
  const uint32_t top = uint32_t{1} << (bits - 1);
  for (uint32_t bit = top; bit > 1; bit >>= 1) {
    const uint32_t below = bit - 1;
    for (int64_t dim = 0; dim < dims; ++dim) {
      if (x[dim] & bit) {
        x[0] ^= below;
      } else {
        const uint32_t swapped = (x[0] ^ x[dim]) & below;
        x[0] ^= swapped;
        x[dim] ^= swapped;
      }
    }
  }
  for (int64_t dim = 1; dim < dims; ++dim) {
    x[dim] ^= x[dim - 1];
  }
  uint32_t gray = 0;
  for (uint32_t bit = top; bit > 1; bit >>= 1) {
    if (x[dims - 1] & bit) {
      gray ^= bit - 1;
    }
  }
  for (int64_t dim = 0; dim < dims; ++dim) {
    x[dim] ^= gray;
  }
}

int64_t place_of(Cell cell, int64_t dims, int64_t bits) {
  to_transposed_place(cell, dims, bits);
  int64_t place = 0;
  for (int64_t bit = bits - 1; bit >= 0; --bit) {
    for (int64_t dim = 0; dim < dims; ++dim) {
      place = 2 * place + ((cell[dim] >> bit) & 1);
    }
  }
  return place;
}

template <class T>
void fill_codes(
    const at::Tensor& points,
    const at::Tensor& low,
    const at::Tensor& high,
    int64_t* codes) {
  const int64_t all = points.size(1);
  const int64_t dims = std::min(all, kMostDims);
  const int64_t bits = std::min<int64_t>(63 / dims, 31);
  const double cells = std::ldexp(1.0, static_cast<int>(bits)) - 1;
  const auto* const from = low.const_data_ptr<double>();
  const auto* const to = high.const_data_ptr<double>();
  std::array<double, kMostDims> scale{};
  for (int64_t dim = 0; dim < dims; ++dim) {
    scale[dim] = to[dim] > from[dim] ? cells / (to[dim] - from[dim]) : 0;
  }
  const T* const x = points.const_data_ptr<T>();
  parallel_for(points.size(0), kGrain, [&](int64_t b, int64_t e) {
    for (int64_t i = b; i < e; ++i) {
      Cell cell{};
      for (int64_t dim = 0; dim < dims; ++dim) {
        const double at =
            (static_cast<double>(x[i * all + dim]) - from[dim]) * scale[dim];
        cell[dim] = static_cast<uint32_t>(std::clamp(at, 0.0, cells));
      }
      codes[i] = place_of(cell, dims, bits);
    }
  });
}

} // namespace

at::Tensor hilbert_codes(
    const at::Tensor& points,
    const at::Tensor& low,
    const at::Tensor& high) {
  const auto x = points.contiguous();
  const auto codes = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "hilbert_codes", [&] {
    fill_codes<scalar_t>(x, low, high, codes.mutable_data_ptr<int64_t>());
  });
  return codes;
}

at::Tensor hilbert_order(const at::Tensor& points) {
  if (points.size(0) == 0) {
    return at::empty({0}, points.options().dtype(at::kLong));
  }
  const auto low = at::amin(points, {0}).to(at::kDouble);
  const auto high = at::amax(points, {0}).to(at::kDouble);
  return at::argsort(hilbert_codes(points, low, high), /*stable=*/true);
}

} // namespace shardtensor::detail
