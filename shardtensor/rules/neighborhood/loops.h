#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "shardtensor/rules/neighborhood/windows.h"

// Everything here is inlined into functions that are compiled for several
// instruction sets.
#define SHARDTENSOR_INLINE inline __attribute__((always_inline))

namespace shardtensor::detail {

// The arithmetic of one query and the keys of its window. T is float or double.

/// Rows of features: one per batch, cell and head; cells in row-major order.
template <class T>
struct FeatureRows {
  T* data = nullptr;
  int64_t batch = 0; // strides
  int64_t cell = 0;
  int64_t head = 0;

  SHARDTENSOR_INLINE T* at(int64_t b, int64_t c, int64_t h) const {
    return data + b * batch + c * cell + h * head;
  }
};

/// Where the windows of a piece are, three dims.
struct NeighborhoodPiece {
  std::vector<LocalWindows> dims;
  int64_t batches = 0;
  int64_t heads = 0;
  int64_t features = 0; // of query and key
  int64_t value_features = 0;
  double scale = 1;

  int64_t queries() const {
    return dims[0].queries() * dims[1].queries() * dims[2].queries();
  }
  /// The cells of the keys that a query sees, those whose row of the first dim
  /// is in `rows`.
  void find_keys(int64_t query, Interval rows, std::vector<int64_t>& cells)
      const {
    const int64_t z = query % dims[2].queries();
    const int64_t y = query / dims[2].queries() % dims[1].queries();
    const int64_t x = query / dims[2].queries() / dims[1].queries();
    cells.clear();
    for (int64_t i = 0; i < dims[0].count(x); ++i) {
      const int64_t row = dims[0].key(x, i);
      if (row < rows.begin || row >= rows.end) {
        continue;
      }
      for (int64_t j = 0; j < dims[1].count(y); ++j) {
        const int64_t line =
            (row * dims[1].keys() + dims[1].key(y, j)) * dims[2].keys();
        for (int64_t k = 0; k < dims[2].count(z); ++k) {
          cells.push_back(line + dims[2].key(z, k));
        }
      }
    }
  }
};

/// Several T side by side, for the vector units; anywhere in memory.
template <class T>
struct SideBySide {
  typedef T type
      __attribute__((vector_size(32), aligned(alignof(T)), may_alias));
  static constexpr int64_t kCount = 32 / sizeof(T);
};

template <class T>
SHARDTENSOR_INLINE const typename SideBySide<T>::type* lanes_at(const T* x) {
  return reinterpret_cast<const typename SideBySide<T>::type*>(x);
}

template <class T>
SHARDTENSOR_INLINE T dot(const T* a, const T* b, int64_t n) {
  constexpr int64_t kLanes = SideBySide<T>::kCount;
  typename SideBySide<T>::type even = {};
  typename SideBySide<T>::type odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    even += lanes_at(a + i)[0] * lanes_at(b + i)[0];
    odd += lanes_at(a + i)[1] * lanes_at(b + i)[1];
  }
  even += odd;
  T sum = 0;
  for (int64_t lane = 0; lane < kLanes / 2; ++lane) {
    sum += even[lane] + even[lane + kLanes / 2];
  }
  for (; i < n; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}

/// y += a x
template <class T>
SHARDTENSOR_INLINE void add_scaled(T* y, T a, const T* x, int64_t n) {
  constexpr int64_t kLanes = SideBySide<T>::kCount;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    *reinterpret_cast<typename SideBySide<T>::type*>(y + i) +=
        a * *lanes_at(x + i);
  }
  for (; i < n; ++i) {
    y[i] += a * x[i];
  }
}

/// to = sum of weights[j] times the row of cells[j], times `factor`.
template <class T>
SHARDTENSOR_INLINE void weighted_sum(
    T* to,
    const T* weights,
    T factor,
    const FeatureRows<const T>& rows,
    int64_t batch,
    int64_t head,
    const std::vector<int64_t>& cells,
    int64_t n) {
  constexpr int64_t kLanes = SideBySide<T>::kCount;
  const T* first = rows.at(batch, 0, head);
  const auto count = static_cast<int64_t>(cells.size());
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    typename SideBySide<T>::type sums[2] = {};
    for (int64_t j = 0; j < count; ++j) {
      const auto* x = lanes_at(first + cells[j] * rows.cell + i);
      sums[0] += weights[j] * x[0];
      sums[1] += weights[j] * x[1];
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      to[i + lane] = sums[0][lane] * factor;
      to[i + kLanes + lane] = sums[1][lane] * factor;
    }
  }
  for (; i < n; ++i) {
    T sum = 0;
    for (int64_t j = 0; j < count; ++j) {
      sum += weights[j] * first[cells[j] * rows.cell + i];
    }
    to[i] = sum * factor;
  }
}

/// exp(x) for x <= 88, to two units in the last place; below e^-87 that. NaN
/// stays. A polynomial, so that several fit into one instruction.
SHARDTENSOR_INLINE float exponential(float given) {
  constexpr float kRound = 12582912.0f; // 1.5 * 2^23: fractions fall off
  const float x = given < -87.0f ? -87.0f : given;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t power =
      std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  return p * std::bit_cast<float>((power + 127) << 23);
}
SHARDTENSOR_INLINE double exponential(double x) {
  return std::exp(x);
}

/// Buffers of one thread.
template <class T>
struct NeighborhoodScratch {
  std::vector<int64_t> cells;
  std::vector<T> weights;
  std::vector<T> changes;

  void find(const NeighborhoodPiece& piece, int64_t query, Interval rows) {
    piece.find_keys(query, rows, cells);
    weights.resize(cells.size());
    changes.resize(cells.size());
  }
};

template <class T>
SHARDTENSOR_INLINE void find_scores(
    T* scores,
    const T* row,
    T scale,
    const FeatureRows<const T>& keys,
    int64_t batch,
    int64_t head,
    const std::vector<int64_t>& cells,
    int64_t n) {
  const T* first = keys.at(batch, 0, head);
  for (size_t j = 0; j < cells.size(); ++j) {
    scores[j] = scale * dot(row, first + cells[j] * keys.cell, n);
  }
}

template <class T>
SHARDTENSOR_INLINE T largest(const T* x, int64_t n) {
  T result = x[0];
  for (int64_t j = 1; j < n; ++j) {
    result = x[j] > result || x[j] != x[j] ? x[j] : result;
  }
  return result;
}

/// Queries [begin, end) of all batches, in row-major order.
template <class T>
SHARDTENSOR_INLINE void attend_queries(
    const NeighborhoodPiece& piece,
    const FeatureRows<const T>& query,
    const FeatureRows<const T>& key,
    const FeatureRows<const T>& value,
    const FeatureRows<T>& output,
    const FeatureRows<T>& log_sum,
    int64_t begin,
    int64_t end) {
  NeighborhoodScratch<T> scratch;
  const int64_t queries = piece.queries();
  const Interval all{0, piece.dims[0].keys()};
  const T scale = static_cast<T>(piece.scale);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i / queries;
    const int64_t c = i % queries;
    scratch.find(piece, c, all);
    const auto& cells = scratch.cells;
    const auto count = static_cast<int64_t>(cells.size());
    T* weights = scratch.weights.data();
    for (int64_t h = 0; h < piece.heads; ++h) {
      find_scores(
          weights, query.at(b, c, h), scale, key, b, h, cells, piece.features);
      const T top = largest(weights, count);
      for (int64_t j = 0; j < count; ++j) {
        weights[j] = exponential(weights[j] - top);
      }
      T sum = 0;
      for (int64_t j = 0; j < count; ++j) {
        sum += weights[j];
      }
      weighted_sum(
          output.at(b, c, h),
          weights,
          1 / sum,
          value,
          b,
          h,
          cells,
          piece.value_features);
      *log_sum.at(b, c, h) = top + std::log(sum);
    }
  }
}

/// What backward of some queries reads and writes. Gradients that are not asked
/// for have no data; those of key and value are added to.
template <class T>
struct GradientRows {
  FeatureRows<const T> grad;
  FeatureRows<const T> query;
  FeatureRows<const T> key;
  FeatureRows<const T> value;
  FeatureRows<const T> output;
  FeatureRows<const T> log_sum;
  FeatureRows<T> of_query;
  FeatureRows<T> of_key;
  FeatureRows<T> of_value;
};

/// One batch, some heads and queries, and the keys whose row of the first dim
/// is in `rows`.
template <class T>
SHARDTENSOR_INLINE void attend_queries_backward(
    const NeighborhoodPiece& piece,
    const GradientRows<T>& all,
    int64_t b,
    Interval heads,
    Interval queries,
    Interval rows) {
  NeighborhoodScratch<T> scratch;
  const int64_t n = piece.features;
  const int64_t m = piece.value_features;
  const T scale = static_cast<T>(piece.scale);
  for (int64_t c = queries.begin; c < queries.end; ++c) {
    scratch.find(piece, c, rows);
    const auto& cells = scratch.cells;
    const auto count = static_cast<int64_t>(cells.size());
    if (count == 0) {
      continue;
    }
    T* weights = scratch.weights.data();
    T* changes = scratch.changes.data();
    for (int64_t h = heads.begin; h < heads.end; ++h) {
      const T* q = all.query.at(b, c, h);
      const T* g = all.grad.at(b, c, h);
      const T log_sum = *all.log_sum.at(b, c, h);
      const T mean = dot(g, all.output.at(b, c, h), m);
      find_scores(weights, q, scale, all.key, b, h, cells, n);
      find_scores(changes, g, T(1), all.value, b, h, cells, m);
      for (int64_t j = 0; j < count; ++j) {
        weights[j] = exponential(weights[j] - log_sum);
        changes[j] = weights[j] * (changes[j] - mean) * scale;
      }
      if (all.of_query.data) {
        weighted_sum(
            all.of_query.at(b, c, h), changes, T(1), all.key, b, h, cells, n);
      }
      if (all.of_key.data) {
        T* first = all.of_key.at(b, 0, h);
        for (int64_t j = 0; j < count; ++j) {
          add_scaled(first + cells[j] * all.of_key.cell, changes[j], q, n);
        }
        first = all.of_value.at(b, 0, h);
        for (int64_t j = 0; j < count; ++j) {
          add_scaled(first + cells[j] * all.of_value.cell, weights[j], g, m);
        }
      }
    }
  }
}

} // namespace shardtensor::detail
