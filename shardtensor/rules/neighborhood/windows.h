#pragma once

#include <cstdint>
#include <vector>

#include <c10/util/ArrayRef.h>

#include "shardtensor/layout/interval.h"

namespace shardtensor::detail {

// Which keys a query sees in neighbourhood attention, along one dim, as NATTEN
// defines it. With dilation d the rows i, i + d, i + 2d, ... are a sequence of
// their own. In it, `stride` queries at a time share the window of their
// leader, the middle one, or the last one where the dim is causal. A window is
// `kernel` rows around the leader, moved inwards at the ends; a causal one ends
// with the leader, and each query sees it as far as itself. Nothing here
// communicates or touches data.

/// One dim of the domain, and the queries of a piece.
///
/// Example: of 8 rows, kernel 3: query 0 sees rows 0 to 2, query 3 rows 2 to 4,
/// query 7 rows 5 to 7. Causal: rows 0, 1 to 3, and 5 to 7.
struct NeighborhoodDim {
  int64_t length = 1; // of the whole domain
  int64_t kernel = 1;
  int64_t dilation = 1;
  int64_t stride = 1;
  bool causal = false;
  Interval queries{0, 1};

  bool operator==(const NeighborhoodDim&) const = default;
};

/// The rows first, first + dilation, ... of a query's window.
struct KeyWindow {
  int64_t first = 0;
  int64_t count = 0;

  bool operator==(const KeyWindow&) const = default;
};
KeyWindow key_window(const NeighborhoodDim& dim, int64_t query);

/// The rows that the queries see, ascending; all rows where the queries are the
/// whole domain. A piece holds the keys of these rows.
std::vector<int64_t> key_rows(const NeighborhoodDim& dim);

/// Some of a piece's queries, and the rows that they see: those that the piece
/// holds with its queries, from its first on, and places among other pieces'
/// rows, ascending, that come before these and after.
struct NeighborhoodPart {
  NeighborhoodDim dim; // whose queries they are
  std::vector<int64_t> before;
  std::vector<int64_t> own;
  std::vector<int64_t> after;
};

/// The rows of other pieces that the queries see, ascending.
std::vector<int64_t> rows_of_others(const NeighborhoodDim& dim);

/// The queries that see own rows only, as many as follow each other, then those
/// before and those after, where there are any.
///
/// Example: rows 4 to 7 of 12, kernel 3: queries 5 and 6, then 4, which sees
/// others' row 3, and 7, which sees row 8.
std::vector<NeighborhoodPart> split_by_owner(const NeighborhoodDim& dim);

/// The dims as the integers that an operator takes, six per dim.
std::vector<int64_t> encode(const std::vector<NeighborhoodDim>& dims);
std::vector<NeighborhoodDim> decode_neighborhood(c10::IntArrayRef code);

/// The windows of a piece's queries among the keys that it holds, along one
/// dim.
class LocalWindows {
 public:
  explicit LocalWindows(const NeighborhoodDim& dim);

  int64_t queries() const {
    return static_cast<int64_t>(windows_.size());
  }
  int64_t keys() const {
    return keys_;
  }
  /// How many keys a query of the piece sees.
  int64_t count(int64_t query) const {
    return windows_[query].count;
  }
  /// Where the piece holds the i-th of them.
  int64_t key(int64_t query, int64_t i) const {
    return places_[windows_[query].first + i * dilation_];
  }

 private:
  int64_t dilation_;
  int64_t keys_;
  std::vector<KeyWindow> windows_; // rows from the first key's on
  std::vector<int64_t> places_; // of such rows
};

} // namespace shardtensor::detail
