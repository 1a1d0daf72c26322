#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace shardtensor::detail {

// The arithmetic of a norm on `width` slices of `length` elements each that lie
// interleaved: element i of slice c is x[i * width + c]. One slice alone is a
// run of elements side by side. S is the tensor's type, T that of the
// arithmetic.

constexpr int64_t kLanes = 16; // elements side by side, for the vector units
constexpr int64_t kRows = 128; // rows of lanes that stay in the first cache

/// A column of elements, kLanes wide: those of as many slices, or of one.
struct Lanes {
  int64_t first; // element
  int64_t rows;
  int64_t stride; // elements from one row to the next
  int64_t count; // at most kLanes
  int64_t slice; // of the first lane
  bool one_slice; // all lanes belong to that slice
};

template <class Visit>
void for_lanes(int64_t length, int64_t width, const Visit& visit) {
  if (width == 1) {
    const int64_t rows = length / kLanes;
    const int64_t rest = length % kLanes;
    if (rows > 0) {
      visit(Lanes{0, rows, kLanes, kLanes, 0, true});
    }
    if (rest > 0) {
      visit(Lanes{rows * kLanes, 1, kLanes, rest, 0, true});
    }
    return;
  }
  for (int64_t slice = 0; slice < width; slice += kLanes) {
    const auto count = std::min(kLanes, width - slice);
    visit(Lanes{slice, length, width, count, slice, false});
  }
}

/// Calls body(element, lane) for the rows [begin, end).
template <class Body>
void for_rows(
    const Lanes& lanes,
    int64_t begin,
    int64_t end,
    const Body& body) {
  if (lanes.count == kLanes) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t element = lanes.first + row * lanes.stride;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        body(element + lane, lane);
      }
    }
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    const int64_t element = lanes.first + row * lanes.stride;
    for (int64_t lane = 0; lane < lanes.count; ++lane) {
      body(element + lane, lane);
    }
  }
}

/// What is known of the slice of each lane, from that of the first one on.
template <class T>
struct PerLane {
  PerLane(const T* first, const Lanes& lanes) {
    for (int64_t lane = 0; lane < lanes.count; ++lane) {
      values[lane] = first[lanes.one_slice ? 0 : lane];
    }
  }
  const T& operator[](int64_t lane) const {
    return values[lane];
  }
  T values[kLanes] = {};
};

/// Sums of lanes as those of slices: lanes of one slice sum into its first.
template <class T>
std::array<double, kLanes> by_slice(
    const T (&sums)[kLanes],
    const Lanes& lanes) {
  std::array<double, kLanes> result{};
  for (int64_t lane = 0; lane < lanes.count; ++lane) {
    result[lanes.one_slice ? 0 : lane] += sums[lane];
  }
  return result;
}

/// Merged as Chan, Golub and LeVeque (1979) merge samples.
struct Sample {
  double count = 0;
  double mean = 0;
  double squares = 0;

  /// More values, of which the sums of x - shift and of its square are given.
  void merge(double more, double shift, double sum, double sum_of_squares) {
    const double step = shift + sum / more - mean;
    const double weight = more / (count + more);
    squares += sum_of_squares - sum * sum / more + step * step * weight * count;
    mean += step * weight;
    count += more;
  }
};

/// Calls visit(begin, end) for rows that stay in the first cache.
template <class Visit>
void for_row_blocks(const Lanes& lanes, const Visit& visit) {
  for (int64_t begin = 0; begin < lanes.rows; begin += kRows) {
    visit(begin, std::min(begin + kRows, lanes.rows));
  }
}

/// Rows are merged into the samples of their slices. What is subtracted before
/// squaring is the mean so far, at first that of the rows: where these are far
/// from it the variance is large, too, so no digits are lost.
template <class T, class S>
void add_rows(
    const S* x,
    const Lanes& lanes,
    int64_t begin,
    int64_t end,
    Sample* samples) {
  const int64_t slices = lanes.one_slice ? 1 : lanes.count;
  const auto count =
      static_cast<double>((end - begin) * (lanes.one_slice ? lanes.count : 1));
  T shifts[kLanes];
  if (samples[0].count > 0) {
    for (int64_t slice = 0; slice < slices; ++slice) {
      shifts[slice] = static_cast<T>(samples[slice].mean);
    }
  } else {
    T sums[kLanes] = {};
    for_rows(lanes, begin, end, [&](int64_t i, int64_t lane) {
      sums[lane] += static_cast<T>(x[i]);
    });
    const auto totals = by_slice(sums, lanes);
    for (int64_t slice = 0; slice < slices; ++slice) {
      shifts[slice] = static_cast<T>(totals[slice] / count);
    }
  }
  const PerLane<T> shift(shifts, lanes);
  T sums[kLanes] = {};
  T squares[kLanes] = {};
  for_rows(lanes, begin, end, [&](int64_t i, int64_t lane) {
    const T deviation = static_cast<T>(x[i]) - shift[lane];
    sums[lane] += deviation;
    squares[lane] += deviation * deviation;
  });
  const auto deviations = by_slice(sums, lanes);
  const auto squared = by_slice(squares, lanes);
  for (int64_t slice = 0; slice < slices; ++slice) {
    samples[slice].merge(
        count, shifts[slice], deviations[slice], squared[slice]);
  }
}

template <class T, class S>
void moments_of(
    const S* x,
    int64_t length,
    int64_t width,
    T* mean,
    T* squares) {
  Sample samples[kLanes];
  for_lanes(length, width, [&](const Lanes& lanes) {
    const int64_t slices = lanes.one_slice ? 1 : lanes.count;
    if (!lanes.one_slice) {
      std::fill_n(samples, kLanes, Sample());
    }
    for_row_blocks(lanes, [&](int64_t begin, int64_t end) {
      add_rows<T>(x, lanes, begin, end, samples);
    });
    for (int64_t slice = 0; slice < slices; ++slice) {
      mean[lanes.slice + slice] = static_cast<T>(samples[slice].mean);
      squares[lanes.slice + slice] = static_cast<T>(samples[slice].squares);
    }
  });
}

/// The sums of y, and of y * (x - mean).
template <class T, class S>
void sums_of(
    const S* x,
    const T* mean,
    const S* y,
    int64_t length,
    int64_t width,
    T* values,
    T* products) {
  double total_values[kLanes] = {};
  double total_products[kLanes] = {};
  for_lanes(length, width, [&](const Lanes& lanes) {
    const int64_t slices = lanes.one_slice ? 1 : lanes.count;
    if (!lanes.one_slice) {
      std::fill_n(total_values, kLanes, 0);
      std::fill_n(total_products, kLanes, 0);
    }
    const PerLane<T> m(mean + lanes.slice, lanes);
    for_row_blocks(lanes, [&](int64_t begin, int64_t end) {
      T sum[kLanes] = {};
      T product[kLanes] = {};
      for_rows(lanes, begin, end, [&](int64_t i, int64_t lane) {
        const T value = static_cast<T>(y[i]);
        sum[lane] += value;
        product[lane] += value * (static_cast<T>(x[i]) - m[lane]);
      });
      const auto block_values = by_slice(sum, lanes);
      const auto block_products = by_slice(product, lanes);
      for (int64_t slice = 0; slice < slices; ++slice) {
        total_values[slice] += block_values[slice];
        total_products[slice] += block_products[slice];
      }
    });
    for (int64_t slice = 0; slice < slices; ++slice) {
      values[lanes.slice + slice] = static_cast<T>(total_values[slice]);
      products[lanes.slice + slice] = static_cast<T>(total_products[slice]);
    }
  });
}

/// (x - mean) * scale + bias.
template <class T, class S>
void scale_of(
    S* __restrict to,
    const S* __restrict x,
    const T* mean,
    const T* scale,
    const T* bias,
    int64_t length,
    int64_t width) {
  for_lanes(length, width, [&](const Lanes& lanes) {
    const PerLane<T> m(mean + lanes.slice, lanes);
    const PerLane<T> s(scale + lanes.slice, lanes);
    const PerLane<T> b(bias + lanes.slice, lanes);
    for_rows(lanes, 0, lanes.rows, [&](int64_t i, int64_t lane) {
      to[i] =
          static_cast<S>((static_cast<T>(x[i]) - m[lane]) * s[lane] + b[lane]);
    });
  });
}

/// (x - mean) * scale + y * scale_y + bias.
template <class T, class S>
void combine_of(
    S* __restrict to,
    const S* __restrict x,
    const S* __restrict y,
    const T* mean,
    const T* scale,
    const T* scale_y,
    const T* bias,
    int64_t length,
    int64_t width) {
  for_lanes(length, width, [&](const Lanes& lanes) {
    const PerLane<T> m(mean + lanes.slice, lanes);
    const PerLane<T> s(scale + lanes.slice, lanes);
    const PerLane<T> t(scale_y + lanes.slice, lanes);
    const PerLane<T> b(bias + lanes.slice, lanes);
    for_rows(lanes, 0, lanes.rows, [&](int64_t i, int64_t lane) {
      to[i] = static_cast<S>(
          (static_cast<T>(x[i]) - m[lane]) * s[lane] +
          static_cast<T>(y[i]) * t[lane] + b[lane]);
    });
  });
}

} // namespace shardtensor::detail
