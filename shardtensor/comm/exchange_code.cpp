#include "shardtensor/comm/exchange_code.h"

#include <algorithm>

#include <c10/util/Exception.h>

namespace shardtensor {

namespace {

constexpr int64_t kHeader = 3; // rank, largest message, source side's length
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

MessageSide read_side(Reader& reader) {
  MessageSide side;
  const int64_t dim = reader.next();
  const int64_t flags = reader.next();
  const int64_t pieces = reader.next();
  side.sizes = reader.next(dim);
  side.starts_at_zero = (flags & kStartsAtZero) != 0;
  side.in_rank_order = (flags & kInRankOrder) != 0;
  side.pieces.reserve(pieces);
  for (int64_t i = 0; i < pieces; ++i) {
    Piece& piece = side.pieces.emplace_back();
    piece.peer = reader.next();
    piece.adds = reader.next() != 0;
    piece.begin = reader.next(dim);
    piece.extent = reader.next(dim);
    piece.numel = product(piece.extent);
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

bool overlap(const Entry& a, const Entry& b) {
  return numel(intersect(*a.box, *b.box)) > 0;
}

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

bool other_peers_overlap(const std::vector<Entry>& entries, int64_t rank) {
  for (size_t i = 0; i < entries.size(); ++i) {
    for (size_t j = i + 1; j < entries.size(); ++j) {
      const bool two_peers = entries[i].peer != entries[j].peer &&
          entries[i].peer != rank && entries[j].peer != rank;
      if (two_peers && overlap(entries[i], entries[j])) {
        return true;
      }
    }
  }
  return false;
}

/// The order in which an exchange writes its target pieces.
std::vector<Entry*> write_order(
    std::vector<Entry>& entries,
    int64_t rank,
    bool in_rank_order) {
  std::vector<Entry*> order;
  for (auto& entry : entries) {
    order.push_back(&entry);
  }
  if (!in_rank_order) {
    std::stable_partition(order.begin(), order.end(), [&](const Entry* entry) {
      return entry->peer == rank;
    });
  }
  return order;
}

/// Marks the entries that meet an earlier one; returns the number of elements
/// that the others write.
int64_t mark_adds(const std::vector<Entry*>& order) {
  int64_t written = 0;
  for (size_t i = 0; i < order.size(); ++i) {
    order[i]->adds = std::any_of(
        order.begin(), order.begin() + i, [&](const Entry* earlier) {
          return overlap(*earlier, *order[i]);
        });
    written += order[i]->adds ? 0 : numel(*order[i]->box);
  }
  return written;
}

void write_side(
    std::vector<int64_t>& code,
    const std::vector<int64_t>& sizes,
    std::vector<Entry> entries,
    int64_t rank,
    bool covers) {
  bool in_rank_order = false;
  bool starts_at_zero = false;
  if (!covers) {
    in_rank_order = other_peers_overlap(entries, rank);
    const int64_t written =
        mark_adds(write_order(entries, rank, in_rank_order));
    starts_at_zero = written != product(sizes);
  }
  code.push_back(static_cast<int64_t>(sizes.size()));
  code.push_back(
      (starts_at_zero ? kStartsAtZero : 0) |
      (in_rank_order ? kInRankOrder : 0));
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

c10::ArrayRef<Piece> MessageSide::of(int64_t peer) const {
  const auto begin = std::lower_bound(
      pieces.begin(), pieces.end(), peer, [](const Piece& piece, int64_t p) {
        return piece.peer < p;
      });
  auto end = begin;
  while (end != pieces.end() && end->peer == peer) {
    ++end;
  }
  return c10::ArrayRef<Piece>(pieces).slice(
      begin - pieces.begin(), end - begin);
}

ExchangeCode decode(c10::IntArrayRef code) {
  Reader reader(code);
  ExchangeCode result;
  result.rank = reader.next();
  result.largest_message = reader.next();
  reader.next(); // the source side's length, for adjoint()
  result.source = read_side(reader);
  result.target = read_side(reader);
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
  const auto source = sides.slice(0, code[2]);
  const auto target = sides.slice(code[2]);
  std::vector<int64_t> result{
      code[0], code[1], static_cast<int64_t>(target.size())};
  result.insert(result.end(), target.begin(), target.end());
  result.insert(result.end(), source.begin(), source.end());
  return result;
}

std::vector<int64_t> encode(
    const ExchangePlan& plan,
    int64_t rank,
    const std::vector<int64_t>& rank_of) {
  std::vector<int64_t> code{rank, plan.largest_message, 0};
  write_side(
      code,
      plan.source_sizes,
      sorted_entries(plan.sends, /*targets=*/false, rank_of),
      rank,
      /*covers=*/false);
  code[2] = static_cast<int64_t>(code.size()) - kHeader;
  write_side(
      code,
      plan.target_sizes,
      sorted_entries(plan.receives, /*targets=*/true, rank_of),
      rank,
      plan.covers);
  return code;
}

} // namespace shardtensor
