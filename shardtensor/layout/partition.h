#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "shardtensor/layout/in_range.h"
#include "shardtensor/layout/interval.h"

namespace shardtensor {

/// How one tensor dim is cut over the pieces of a mesh: piece p owns
/// [offsets[p], offsets[p + 1]). Pieces may differ in size and may be empty;
/// together they tile [0, period()) in order. Uneven is the only case.
///
/// Note [Repeated partition]
/// Merging an unsharded outer dim with a sharded inner one, (B, S) -> (B * S),
/// leaves every piece with B separate intervals: the same cut repeated B times
/// with period S. `repeat()` is that B. Rules that treat a dim as a bag of
/// rows (pointwise, linear, reductions) need not look at it; rules that need
/// neighbours ask `is_contiguous()` and redistribute first.
///
/// Example: Partition({3, 2}) cuts 5 rows as [0, 3) and [3, 5). Repeated twice
/// it covers 10 rows: piece 0 owns [0, 3) and [5, 8).
class Partition {
 public:
  /// Piece sizes in order; each >= 0. Raises on a negative size, an empty list
  /// or repeat < 1.
  explicit Partition(const std::vector<int64_t>& sizes, int64_t repeat = 1);

  /// torch.chunk's split: pieces of ceil(extent / pieces), the last ones
  /// smaller or empty. chunked(5, 4) has sizes 2, 2, 1, 0.
  static Partition chunked(int64_t extent, int64_t pieces);

  /// DTensor's split of one dim over several mesh axes: chunk over the first
  /// axis, then each chunk over the next. Pieces in row-major order.
  static Partition chunked(int64_t extent, const std::vector<int64_t>& axes);

  int64_t pieces() const {
    return static_cast<int64_t>(offsets_.size()) - 1;
  }
  int64_t repeat() const {
    return repeat_;
  }
  bool is_contiguous() const {
    return repeat_ == 1;
  }
  /// The extent of one repetition.
  int64_t period() const {
    return offsets_.back();
  }
  /// The global extent of the dim.
  int64_t extent() const {
    return repeat_ * period();
  }
  /// The rows of one repetition that piece owns.
  Interval interval(int64_t piece) const {
    detail::in_range("Partition", "piece", piece, pieces());
    return {offsets_[piece], offsets_[piece + 1]};
  }
  /// The number of rows that piece owns in all repetitions.
  int64_t local_extent(int64_t piece) const {
    return repeat_ * interval(piece).extent();
  }
  /// Of every piece.
  std::vector<int64_t> local_extents() const;
  /// Piece sizes of one repetition.
  std::vector<int64_t> sizes() const;
  bool has_empty_piece() const;
  const std::vector<int64_t>& offsets() const {
    return offsets_;
  }
  /// The piece that owns this row, 0 <= row < extent().
  int64_t owner(int64_t row) const;
  /// The row of the dim that is row `local` of a piece,
  /// 0 <= local < local_extent(piece). 2 x [3, 2]: row 2 of piece 1 is row 8.
  int64_t global_row(int64_t piece, int64_t local) const;

  /// Cut points times `by`: the partition of dims (n, by) merged.
  Partition scaled(int64_t by) const;
  /// The same cut, repeated `times` as often: dims (times, n) merged. Zero
  /// times leaves every piece empty.
  Partition repeated(int64_t times) const;

  bool operator==(const Partition&) const = default;

 private:
  std::vector<int64_t> offsets_; // pieces() + 1 entries, offsets_[0] == 0
  int64_t repeat_ = 1;
  bool has_empty_piece_ = false;
};

/// "[3, 2]"; "2 x [3, 2]" when it is repeated.
std::ostream& operator<<(std::ostream& out, const Partition& partition);

} // namespace shardtensor
