#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "shardtensor/layout/interval.h"

namespace shardtensor {

/// Which rows of one dim a rank needs, in the order of its new local tensor:
/// rows of the global tensor, or zeros. Rows that follow each other are one
/// run, so that a piece of a billion rows and its halo are a few numbers.
class RowSource {
 public:
  /// `extent` consecutive rows from `begin` on, or as many of zeros.
  struct Run {
    int64_t begin = 0; // kZeros for zeros
    int64_t extent = 0;
    bool operator==(const Run&) const = default;
  };
  static constexpr int64_t kZeros = -1;

  RowSource() = default;
  /// Of these rows, one by one; -1 stands for zeros.
  RowSource(std::initializer_list<int64_t> rows);
  explicit RowSource(const std::vector<int64_t>& rows);

  /// One more row, or a row of zeros for -1.
  void push_back(int64_t row);
  void append(const Interval& rows);
  void append_zeros(int64_t extent);
  void append(const RowSource& more);

  /// The same with `by` added to every row; zeros stay.
  RowSource shifted(int64_t by) const;

  int64_t extent() const;
  const std::vector<Run>& runs() const {
    return runs_;
  }
  bool operator==(const RowSource&) const = default;

 private:
  void append(const Run& run);

  std::vector<Run> runs_; // longest ones, none empty
};

} // namespace shardtensor
