#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "shardtensor/points/search.h"

namespace shardtensor::detail {

/// The k best neighbours of a query, ascending, see Note [Order of neighbours].
/// To take one in, each place keeps what it has or gets the larger of what is
/// new and what stood before it: no branches.
template <class T>
class SortedList;

inline constexpr int64_t kPadding = 4; // places side by side
inline constexpr int64_t kNoSquare = 0x7F800000; // infinity's bits

inline int64_t padded(int64_t k) {
  return (k + kPadding - 1) / kPadding * kPadding;
}

/// Not negative floats are ordered as their bits are: a distance and a row are
/// one number.
template <>
class SortedList<float> {
 public:
  explicit SortedList(int64_t k)
      : k_(k),
        padded_(padded(k)),
        memory_(2 * (padded_ + kPadding), INT64_MIN),
        list_(memory_.data() + kPadding),
        next_(list_ + padded_ + kPadding) {}

  [[gnu::always_inline]] void load(const float* squares, const int64_t* rows) {
    for (int64_t i = 0; i < k_; ++i) {
      list_[i] = rows[i] == Nearest::kNoRow ? kNone : key(squares[i], rows[i]);
    }
    std::fill(list_ + k_, list_ + padded_, kNone);
  }
  [[gnu::always_inline]] void store(float* squares, int64_t* rows) const {
    for (int64_t i = 0; i < k_; ++i) {
      squares[i] = std::bit_cast<float>(static_cast<int32_t>(list_[i] >> 32));
      const int64_t row = list_[i] & kRowBits;
      rows[i] = row == kRowBits ? Nearest::kNoRow : row;
    }
  }
  [[gnu::always_inline]] void take(float square, int64_t row) {
    const int64_t taken = key(square, row);
    const int64_t* __restrict list = list_;
    int64_t* __restrict next = next_;
    for (int64_t first = 0; first < padded_; first += kPadding) {
      for (int64_t i = first; i < first + kPadding; ++i) {
        const int64_t before = list[i - 1] > taken ? list[i - 1] : taken;
        next[i] = list[i] < before ? list[i] : before;
      }
    }
    std::swap(list_, next_);
  }
  [[gnu::always_inline]] float last() const {
    return std::bit_cast<float>(static_cast<int32_t>(list_[k_ - 1] >> 32));
  }

 private:
  static constexpr int64_t kRowBits = 0xFFFFFFFF;
  static constexpr int64_t kNone = (kNoSquare << 32) | kRowBits;

  [[gnu::always_inline]] static int64_t key(float square, int64_t row) {
    return (static_cast<int64_t>(std::bit_cast<int32_t>(square)) << 32) | row;
  }

  int64_t k_;
  int64_t padded_;
  std::vector<int64_t> memory_;
  int64_t* list_;
  int64_t* next_;
};

template <>
class SortedList<double> {
 public:
  explicit SortedList(int64_t k)
      : k_(k),
        padded_(padded(k)),
        square_memory_(2 * (padded_ + kPadding), -1),
        row_memory_(2 * (padded_ + kPadding), -1),
        list_(at(0)),
        next_(at(padded_ + kPadding)) {}

  [[gnu::always_inline]] void load(const double* squares, const int64_t* rows) {
    std::copy_n(squares, k_, list_.squares);
    std::copy_n(rows, k_, list_.rows);
    for (int64_t i = k_; i < padded_; ++i) {
      list_.squares[i] = std::numeric_limits<double>::infinity();
      list_.rows[i] = Nearest::kNoRow;
    }
  }
  [[gnu::always_inline]] void store(double* squares, int64_t* rows) const {
    std::copy_n(list_.squares, k_, squares);
    std::copy_n(list_.rows, k_, rows);
  }
  [[gnu::always_inline]] void take(double square, int64_t row) {
    const double* __restrict squares = list_.squares;
    const int64_t* __restrict rows = list_.rows;
    double* __restrict next_squares = next_.squares;
    int64_t* __restrict next_rows = next_.rows;
    const auto stays = [&](int64_t i) {
      return (squares[i] < square) | ((squares[i] == square) & (rows[i] < row));
    };
    for (int64_t first = 0; first < padded_; first += kPadding) {
      for (int64_t i = first; i < first + kPadding; ++i) {
        const double before = stays(i - 1) ? square : squares[i - 1];
        const int64_t row_before = stays(i - 1) ? row : rows[i - 1];
        next_squares[i] = stays(i) ? squares[i] : before;
        next_rows[i] = stays(i) ? rows[i] : row_before;
      }
    }
    std::swap(list_, next_);
  }
  [[gnu::always_inline]] double last() const {
    return list_.squares[k_ - 1];
  }

 private:
  struct List {
    double* squares;
    int64_t* rows;
  };
  List at(int64_t place) {
    return {
        square_memory_.data() + kPadding + place,
        row_memory_.data() + kPadding + place};
  }

  int64_t k_;
  int64_t padded_;
  std::vector<double> square_memory_;
  std::vector<int64_t> row_memory_;
  List list_;
  List next_;
};

} // namespace shardtensor::detail
