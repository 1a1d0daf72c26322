#include "shardtensor/points/curve.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <ATen/Dispatch.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>

#include "shardtensor/points/boxes.h"
#include "shardtensor/threads/parallel_for.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kMostDims = 8;
constexpr int64_t kGrain = 4096;

// Cells side by side, which one instruction takes at once.
constexpr int64_t kLanes = 8;
using Cells = std::array<std::array<uint32_t, kLanes>, kMostDims>;

/// J. Skilling, "Programming the Hilbert curve" (2004): a cell's coordinates
/// become the bits of its place, dim by dim. Where a coordinate has a bit, the
/// first one is turned over below it; else the two are swapped there.
void to_transposed_places(Cells& x, int64_t dims, int64_t bits) {
  for (int64_t bit = bits - 1; bit > 0; --bit) {
    const uint32_t below = (uint32_t{1} << bit) - 1;
    for (int64_t dim = 0; dim < dims; ++dim) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const uint32_t turned = -(x[dim][lane] >> bit & 1) & below;
        const uint32_t swapped = (x[0][lane] ^ x[dim][lane]) & (below ^ turned);
        x[0][lane] ^= swapped ^ turned;
        x[dim][lane] ^= swapped;
      }
    }
  }
  for (int64_t dim = 1; dim < dims; ++dim) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      x[dim][lane] ^= x[dim - 1][lane];
    }
  }
  std::array<uint32_t, kLanes> gray{};
  for (int64_t bit = bits - 1; bit > 0; --bit) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t below = (uint32_t{1} << bit) - 1;
      gray[lane] ^= -(x[dims - 1][lane] >> bit & 1) & below;
    }
  }
  for (int64_t dim = 0; dim < dims; ++dim) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      x[dim][lane] ^= gray[lane];
    }
  }
}

std::array<int64_t, kLanes> places_of(Cells cells, int64_t dims, int64_t bits) {
  to_transposed_places(cells, dims, bits);
  std::array<int64_t, kLanes> places{};
  for (int64_t bit = bits - 1; bit >= 0; --bit) {
    for (int64_t dim = 0; dim < dims; ++dim) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        places[lane] = 2 * places[lane] + (cells[dim][lane] >> bit & 1);
      }
    }
  }
  return places;
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
  const double cells_of_dim = std::ldexp(1.0, static_cast<int>(bits)) - 1;
  const auto* const from = low.const_data_ptr<double>();
  const auto* const to = high.const_data_ptr<double>();
  std::array<double, kMostDims> scale{};
  for (int64_t dim = 0; dim < dims; ++dim) {
    scale[dim] = to[dim] > from[dim] ? cells_of_dim / (to[dim] - from[dim]) : 0;
  }
  const T* const x = points.const_data_ptr<T>();
  parallel_for(points.size(0), kGrain, [&](int64_t b, int64_t e) {
    for (int64_t first = b; first < e; first += kLanes) {
      const int64_t lanes = std::min(kLanes, e - first);
      Cells cells{};
      for (int64_t dim = 0; dim < dims; ++dim) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const auto value = static_cast<double>(x[(first + lane) * all + dim]);
          const double at = (value - from[dim]) * scale[dim];
          cells[dim][lane] =
              static_cast<uint32_t>(std::clamp(at, 0.0, cells_of_dim));
        }
      }
      const auto places = places_of(cells, dims, bits);
      std::copy_n(places.begin(), lanes, codes + first);
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
  const auto box = box_of(points).to(at::kDouble);
  const auto codes = hilbert_codes(points, box.select(0, 0), box.select(0, 1));
  return at::argsort(codes, /*stable=*/true);
}

} // namespace shardtensor::detail
