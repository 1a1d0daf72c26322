#include "shardtensor/layout/partition.h"

#include <algorithm>

#include <c10/util/Exception.h>

#include "shardtensor/layout/print.h"

namespace shardtensor {

using namespace detail;

namespace {

std::vector<int64_t> chunk_sizes(int64_t extent, int64_t pieces) {
  const int64_t full = (extent + pieces - 1) / pieces;
  std::vector<int64_t> sizes;
  sizes.reserve(pieces);
  for (int64_t left = extent; pieces > 0; --pieces) {
    sizes.push_back(std::min(full, left));
    left -= sizes.back();
  }
  return sizes;
}

void check_extent(int64_t extent) {
  TORCH_CHECK_VALUE(
      extent >= 0, "Partition: extent ", extent, ", expected at least 0");
}

void check_pieces(int64_t pieces) {
  TORCH_CHECK_VALUE(
      pieces >= 1, "Partition: ", pieces, " pieces, expected at least 1");
}

} // namespace

Partition::Partition(const std::vector<int64_t>& sizes, int64_t repeat)
    : repeat_(repeat) {
  TORCH_CHECK_VALUE(
      !sizes.empty(), "Partition: no sizes, expected one per piece");
  TORCH_CHECK_VALUE(
      repeat >= 1, "Partition: repeat ", repeat, ", expected at least 1");
  offsets_.reserve(sizes.size() + 1);
  offsets_.push_back(0);
  for (int64_t size : sizes) {
    TORCH_CHECK_VALUE(
        size >= 0,
        "Partition: size ",
        size,
        " in [",
        join(sizes),
        "], expected at least 0");
    offsets_.push_back(offsets_.back() + size);
    has_empty_piece_ = has_empty_piece_ || size == 0;
  }
}

Partition Partition::chunked(int64_t extent, int64_t pieces) {
  check_extent(extent);
  check_pieces(pieces);
  return Partition(chunk_sizes(extent, pieces));
}

Partition Partition::chunked(int64_t extent, const std::vector<int64_t>& axes) {
  check_extent(extent);
  std::vector<int64_t> sizes{extent};
  for (int64_t pieces : axes) {
    check_pieces(pieces);
    std::vector<int64_t> finer;
    finer.reserve(sizes.size() * pieces);
    for (int64_t size : sizes) {
      const std::vector<int64_t> cut = chunk_sizes(size, pieces);
      finer.insert(finer.end(), cut.begin(), cut.end());
    }
    sizes = std::move(finer);
  }
  return Partition(sizes);
}

std::vector<int64_t> Partition::local_extents() const {
  std::vector<int64_t> extents;
  for (int64_t piece = 0; piece < pieces(); ++piece) {
    extents.push_back(local_extent(piece));
  }
  return extents;
}

std::vector<int64_t> Partition::sizes() const {
  std::vector<int64_t> result;
  result.reserve(pieces());
  for (int64_t piece = 0; piece < pieces(); ++piece) {
    result.push_back(interval(piece).extent());
  }
  return result;
}

bool Partition::has_empty_piece() const {
  return has_empty_piece_;
}

int64_t Partition::owner(int64_t row) const {
  in_range("Partition", "row", row, extent());
  // The last piece that begins at or before the row: empty ones come earlier.
  const auto after =
      std::upper_bound(offsets_.begin(), offsets_.end(), row % period());
  return after - offsets_.begin() - 1;
}

int64_t Partition::global_row(int64_t piece, int64_t local) const {
  const Interval own = interval(piece);
  TORCH_CHECK_INDEX(
      local >= 0 && local < local_extent(piece),
      "Partition: local row ",
      local,
      " of piece ",
      piece,
      ", expected 0 <= local < ",
      local_extent(piece));
  return local / own.extent() * period() + own.begin + local % own.extent();
}

Partition Partition::scaled(int64_t by) const {
  TORCH_CHECK_VALUE(
      by >= 0, "Partition: scaled by ", by, ", expected at least 0");
  Partition result = *this;
  for (int64_t& offset : result.offsets_) {
    offset *= by;
  }
  result.has_empty_piece_ = has_empty_piece_ || by == 0;
  return result;
}

Partition Partition::repeated(int64_t times) const {
  TORCH_CHECK_VALUE(
      times >= 0, "Partition: repeated ", times, " times, expected at least 0");
  if (times == 0) {
    return scaled(0);
  }
  Partition result = *this;
  result.repeat_ *= times;
  return result;
}

std::ostream& operator<<(std::ostream& out, const Partition& partition) {
  if (!partition.is_contiguous()) {
    out << partition.repeat() << " x ";
  }
  return out << '[' << join(partition.sizes()) << ']';
}

} // namespace shardtensor
