#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace shardtensor::detail {

// The arithmetic of a norm on `width` cells of `length` elements each that lie
// interleaved: element i of cell c is x[i * width + c]. One cell alone is a run
// of elements side by side. S is the tensor's type, T that of the arithmetic.

constexpr int64_t kLanes = 16; // elements side by side, for the vector units
constexpr int64_t kRows = 128; // rows of lanes that stay in the first cache

/// A column of elements, kLanes wide: those of as many cells, or of one.
struct Lanes {
  int64_t first; // element
  int64_t rows;
  int64_t stride; // elements from one row to the next
  int64_t count; // at most kLanes
  int64_t cell; // of the first lane
  bool one_cell; // all lanes belong to that cell
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
  for (int64_t cell = 0; cell < width; cell += kLanes) {
    const auto count = std::min(kLanes, width - cell);
    visit(Lanes{cell, length, width, count, cell, false});
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

/// What is known of the cell of each lane, from that of the first one on.
template <class T>
struct PerLane {
  PerLane(const T* first, const Lanes& lanes) {
    for (int64_t lane = 0; lane < lanes.count; ++lane) {
      values[lane] = first[lanes.one_cell ? 0 : lane];
    }
  }
  const T& operator[](int64_t lane) const {
    return values[lane];
  }
  T values[kLanes] = {};
};

/// Sums of lanes as those of cells: lanes of one cell sum into its first.
template <class T>
std::array<double, kLanes> by_cell(
    const T (&sums)[kLanes],
    const Lanes& lanes) {
  std::array<double, kLanes> result{};
  for (int64_t lane = 0; lane < lanes.count; ++lane) {
    result[lanes.one_cell ? 0 : lane] += sums[lane];
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

/// Rows are merged into the samples of their cells. What is subtracted before
/// squaring is the mean so far, at first that of the rows: where these are far
/// from it the variance is large, too, so no digits are lost.
template <class T, class S>
void add_rows(
    const S* x,
    const Lanes& lanes,
    int64_t begin,
    int64_t end,
    Sample* samples) {
  const int64_t cells = lanes.one_cell ? 1 : lanes.count;
  const auto count =
      static_cast<double>((end - begin) * (lanes.one_cell ? lanes.count : 1));
  T shifts[kLanes];
  if (samples[0].count > 0) {
    for (int64_t cell = 0; cell < cells; ++cell) {
      shifts[cell] = static_cast<T>(samples[cell].mean);
    }
  } else {
    T sums[kLanes] = {};
    for_rows(lanes, begin, end, [&](int64_t i, int64_t lane) {
      sums[lane] += static_cast<T>(x[i]);
    });
    const auto totals = by_cell(sums, lanes);
    for (int64_t cell = 0; cell < cells; ++cell) {
      shifts[cell] = static_cast<T>(totals[cell] / count);
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
  const auto deviations = by_cell(sums, lanes);
  const auto squared = by_cell(squares, lanes);
  for (int64_t cell = 0; cell < cells; ++cell) {
    samples[cell].merge(count, shifts[cell], deviations[cell], squared[cell]);
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
    const int64_t cells = lanes.one_cell ? 1 : lanes.count;
    if (!lanes.one_cell) {
      std::fill_n(samples, kLanes, Sample());
    }
    for_row_blocks(lanes, [&](int64_t begin, int64_t end) {
      add_rows<T>(x, lanes, begin, end, samples);
    });
    for (int64_t cell = 0; cell < cells; ++cell) {
      mean[lanes.cell + cell] = static_cast<T>(samples[cell].mean);
      squares[lanes.cell + cell] = static_cast<T>(samples[cell].squares);
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
    const int64_t cells = lanes.one_cell ? 1 : lanes.count;
    if (!lanes.one_cell) {
      std::fill_n(total_values, kLanes, 0);
      std::fill_n(total_products, kLanes, 0);
    }
    const PerLane<T> m(mean + lanes.cell, lanes);
    for_row_blocks(lanes, [&](int64_t begin, int64_t end) {
      T sum[kLanes] = {};
      T product[kLanes] = {};
      for_rows(lanes, begin, end, [&](int64_t i, int64_t lane) {
        const T value = static_cast<T>(y[i]);
        sum[lane] += value;
        product[lane] += value * (static_cast<T>(x[i]) - m[lane]);
      });
      const auto block_values = by_cell(sum, lanes);
      const auto block_products = by_cell(product, lanes);
      for (int64_t cell = 0; cell < cells; ++cell) {
        total_values[cell] += block_values[cell];
        total_products[cell] += block_products[cell];
      }
    });
    for (int64_t cell = 0; cell < cells; ++cell) {
      values[lanes.cell + cell] = static_cast<T>(total_values[cell]);
      products[lanes.cell + cell] = static_cast<T>(total_products[cell]);
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
    const PerLane<T> m(mean + lanes.cell, lanes);
    const PerLane<T> s(scale + lanes.cell, lanes);
    const PerLane<T> b(bias + lanes.cell, lanes);
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
    const PerLane<T> m(mean + lanes.cell, lanes);
    const PerLane<T> s(scale + lanes.cell, lanes);
    const PerLane<T> t(scale_y + lanes.cell, lanes);
    const PerLane<T> b(bias + lanes.cell, lanes);
    for_rows(lanes, 0, lanes.rows, [&](int64_t i, int64_t lane) {
      to[i] = static_cast<S>(
          (static_cast<T>(x[i]) - m[lane]) * s[lane] +
          static_cast<T>(y[i]) * t[lane] + b[lane]);
    });
  });
}

} // namespace shardtensor::detail
