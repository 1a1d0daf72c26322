#include "shardtensor/comm/exchange_code.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <c10/util/Exception.h>

namespace shardtensor::detail {

namespace {

// Rank, ranks, largest message, source side's length.
constexpr int64_t kHeader = 4;
constexpr int64_t kStartsAtZero = 1;
constexpr int64_t kInRankOrder = 2;

// ---- reading ----------------------------------------------------------------

/// Takes integers from the front of a code.
class Reader {
 public:
  explicit Reader(c10::IntArrayRef code) : rest_(code) {}

  int64_t next() {
    return next(1)[0];
  }
  c10::IntArrayRef next(int64_t count) {
    TORCH_CHECK_VALUE(
        count >= 0 && count <= static_cast<int64_t>(rest_.size()),
        "shardtensor::exchange: the code ends after ",
        rest_.size(),
        " more integers, expected ",
        count);
    const auto taken = rest_.slice(0, count);
    rest_ = rest_.slice(count);
    return taken;
  }
  bool done() const {
    return rest_.empty();
  }

 private:
  c10::IntArrayRef rest_;
};

int64_t product(c10::IntArrayRef extent) {
  int64_t result = 1;
  for (const auto n : extent) {
    result *= n;
  }
  return result;
}

void check_peer(int64_t peer, int64_t ranks) {
  TORCH_CHECK_VALUE(
      peer >= 0 && peer < ranks,
      "shardtensor::exchange: the code has a piece of rank ",
      peer,
      ", expected one of ",
      ranks,
      " ranks");
}

MessageSide read_side(Reader& reader, int64_t ranks) {
  MessageSide side;
  const int64_t dim = reader.next();
  const int64_t flags = reader.next();
  const int64_t pieces = reader.next();
  side.sizes = reader.next(dim);
  side.starts_at_zero = (flags & kStartsAtZero) != 0;
  side.in_rank_order = (flags & kInRankOrder) != 0;
  side.pieces.reserve(pieces);
  for (int64_t i = 0; i < pieces; ++i) {
    MessageBox& piece = side.pieces.emplace_back();
    piece.peer = reader.next();
    check_peer(piece.peer, ranks);
    piece.adds = reader.next() != 0;
    piece.begin = reader.next(dim);
    piece.extent = reader.next(dim);
    piece.numel = product(piece.extent);
    for (int64_t d = 0; d < dim; ++d) {
      TORCH_CHECK_VALUE(
          piece.begin[d] >= 0 && piece.extent[d] >= 0 &&
              piece.begin[d] + piece.extent[d] <= side.sizes[d],
          "shardtensor::exchange: the code has a piece that begins at ",
          piece.begin,
          " and extends over ",
          piece.extent,
          ", expected one within ",
          side.sizes);
    }
  }
  return side;
}

// ---- writing ----------------------------------------------------------------

/// A box of the plan before it is written down.
struct Entry {
  int64_t peer = 0;
  const Box* box = nullptr;
  bool adds = false;
};

std::vector<Entry> sorted_entries(
    const std::vector<Transfer>& transfers,
    bool targets,
    const std::vector<int64_t>& rank_of) {
  std::vector<Entry> entries;
  for (const auto& transfer : transfers) {
    const Box& box = targets ? transfer.target : transfer.source;
    if (numel(box) > 0) {
      const int64_t position = targets ? transfer.src : transfer.dst;
      entries.push_back({rank_of.at(position), &box});
    }
  }
  std::stable_sort(
      entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
        return a.peer < b.peer;
      });
  return entries;
}

/// The dim along which the boxes begin at the most different places.
size_t sweep_dim(const std::vector<Entry>& entries) {
  size_t best = 0;
  size_t most = 0;
  for (size_t dim = 0; dim < entries[0].box->size(); ++dim) {
    std::vector<int64_t> begins;
    for (const auto& entry : entries) {
      begins.push_back((*entry.box)[dim].begin);
    }
    std::sort(begins.begin(), begins.end());
    const size_t places =
        std::unique(begins.begin(), begins.end()) - begins.begin();
    if (places > most) {
      most = places;
      best = dim;
    }
  }
  return best;
}

/// Entries that share elements, as indices. A sweep along one dim meets few
/// candidates even where a plan has thousands of boxes.
std::vector<std::pair<size_t, size_t>> overlaps(
    const std::vector<Entry>& entries) {
  std::vector<std::pair<size_t, size_t>> result;
  if (entries.size() < 2) {
    return result;
  }
  std::vector<size_t> by_begin(entries.size());
  std::iota(by_begin.begin(), by_begin.end(), 0);
  const bool has_dims = !entries[0].box->empty();
  const size_t dim = has_dims ? sweep_dim(entries) : 0;
  const auto along = [&](size_t i) {
    return has_dims ? (*entries[i].box)[dim] : Interval{0, 1};
  };
  std::stable_sort(by_begin.begin(), by_begin.end(), [&](size_t a, size_t b) {
    return along(a).begin < along(b).begin;
  });
  for (size_t a = 0; a < by_begin.size(); ++a) {
    const size_t i = by_begin[a];
    for (size_t b = a + 1; b < by_begin.size(); ++b) {
      const size_t j = by_begin[b];
      if (along(j).begin >= along(i).end) {
        break;
      }
      if (numel(intersect(*entries[i].box, *entries[j].box)) > 0) {
        result.emplace_back(i, j);
      }
    }
  }
  return result;
}

/// How the pieces of one side are written, were it the target.
struct Writing {
  bool in_rank_order = false;
  bool starts_at_zero = false;
};

/// Marks the entries that add to what an earlier one wrote. The order is that
/// of ranks, or this rank's own pieces first.
Writing plan_writing(
    std::vector<Entry>& entries,
    int64_t rank,
    const std::vector<int64_t>& sizes) {
  const auto pairs = overlaps(entries);
  Writing result;
  for (const auto& [i, j] : pairs) {
    const int64_t a = entries[i].peer;
    const int64_t b = entries[j].peer;
    result.in_rank_order |= a != b && a != rank && b != rank;
  }
  const auto place = [&](size_t i) {
    const bool first = !result.in_rank_order && entries[i].peer == rank;
    return std::make_pair(first ? 0 : 1, i);
  };
  for (const auto& [i, j] : pairs) {
    entries[place(i) < place(j) ? j : i].adds = true;
  }
  int64_t written = 0;
  for (const auto& entry : entries) {
    written += entry.adds ? 0 : numel(*entry.box);
  }
  result.starts_at_zero = written != product(sizes);
  return result;
}

void write_side(
    std::vector<int64_t>& code,
    const std::vector<int64_t>& sizes,
    std::vector<Entry> entries,
    int64_t rank,
    bool covers) {
  const Writing writing =
      covers ? Writing{} : plan_writing(entries, rank, sizes);
  code.push_back(static_cast<int64_t>(sizes.size()));
  code.push_back(
      (writing.starts_at_zero ? kStartsAtZero : 0) |
      (writing.in_rank_order ? kInRankOrder : 0));
  code.push_back(static_cast<int64_t>(entries.size()));
  code.insert(code.end(), sizes.begin(), sizes.end());
  for (const auto& entry : entries) {
    code.push_back(entry.peer);
    code.push_back(entry.adds ? 1 : 0);
    for (const auto& interval : *entry.box) {
      code.push_back(interval.begin);
    }
    for (const auto& interval : *entry.box) {
      code.push_back(interval.extent());
    }
  }
}

} // namespace

c10::ArrayRef<MessageBox> MessageSide::of(int64_t peer) const {
  const auto begin = std::lower_bound(
      pieces.begin(),
      pieces.end(),
      peer,
      [](const MessageBox& piece, int64_t p) { return piece.peer < p; });
  auto end = begin;
  while (end != pieces.end() && end->peer == peer) {
    ++end;
  }
  return c10::ArrayRef<MessageBox>(pieces).slice(
      begin - pieces.begin(), end - begin);
}

ExchangeCode decode(c10::IntArrayRef code) {
  Reader reader(code);
  ExchangeCode result;
  result.rank = reader.next();
  result.ranks = reader.next();
  result.largest_message = reader.next();
  reader.next(); // the source side's length, for adjoint()
  result.source = read_side(reader, result.ranks);
  result.target = read_side(reader, result.ranks);
  TORCH_CHECK_VALUE(
      reader.done(), "shardtensor::exchange: the code is too long");
  const auto leave = result.source.of(result.rank).size();
  const auto arrive = result.target.of(result.rank).size();
  TORCH_CHECK_VALUE(
      leave == arrive,
      "shardtensor::exchange: the code has ",
      leave,
      " source pieces that stay on the rank and ",
      arrive,
      " target pieces, expected as many");
  return result;
}

std::vector<int64_t> adjoint(c10::IntArrayRef code) {
  TORCH_CHECK_VALUE(
      code.size() > kHeader, "shardtensor::exchange: the code is too short");
  const auto sides = code.slice(kHeader);
  const auto source = sides.slice(0, code[kHeader - 1]);
  const auto target = sides.slice(code[kHeader - 1]);
  std::vector<int64_t> result(code.begin(), code.begin() + kHeader);
  result.back() = static_cast<int64_t>(target.size());
  result.insert(result.end(), target.begin(), target.end());
  result.insert(result.end(), source.begin(), source.end());
  return result;
}

std::vector<int64_t> encode(
    const ExchangePlan& plan,
    int64_t rank,
    const std::vector<int64_t>& rank_of) {
  const auto last = std::max_element(rank_of.begin(), rank_of.end());
  std::vector<int64_t> code{rank, *last + 1, plan.largest_message, 0};
  write_side(
      code,
      plan.source_sizes,
      sorted_entries(plan.sends, /*targets=*/false, rank_of),
      rank,
      /*covers=*/false);
  code[kHeader - 1] = static_cast<int64_t>(code.size()) - kHeader;
  write_side(
      code,
      plan.target_sizes,
      sorted_entries(plan.receives, /*targets=*/true, rank_of),
      rank,
      plan.covers);
  return code;
}

} // namespace shardtensor::detail
