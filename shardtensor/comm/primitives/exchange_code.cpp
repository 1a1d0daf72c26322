#include "shardtensor/comm/primitives/exchange_code.h"

#include <algorithm>
#include <numeric>

#include <c10/util/Exception.h>

#include "shardtensor/comm/primitives/exchange_writing.h"

namespace shardtensor::detail {

namespace {

// Rank, ranks, largest message, peers, channels last, gathers, source side's
// length.
constexpr int64_t kHeader = 7;
constexpr int64_t kNotKnown = -1; // the largest message
constexpr int64_t kChannelsLast = 4;
constexpr int64_t kGathers = 5;
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

// ---- channels last ----------------------------------------------------------

/// `dims` numbers, one per dim; returns their end.
int64_t* put_channels_last(int64_t* numbers, int64_t dims) {
  std::rotate(numbers + 1, numbers + 2, numbers + dims);
  return numbers + dims;
}

/// The side that begins here; returns its end.
int64_t* put_channels_of_side_last(int64_t* side) {
  const int64_t dims = side[0];
  const int64_t pieces = side[2];
  int64_t* next = put_channels_last(side + 3, dims);
  for (int64_t i = 0; i < pieces; ++i) {
    next = put_channels_last(next + 2, dims); // after peer and flag: begin
    next = put_channels_last(next, dims); // extent
  }
  return next;
}

// ---- writing ----------------------------------------------------------------

std::vector<BoxOfPeer> sorted_entries(
    const std::vector<Transfer>& transfers,
    bool targets,
    const std::vector<int64_t>& rank_of) {
  std::vector<BoxOfPeer> entries;
  for (const auto& transfer : transfers) {
    const Box& box = targets ? transfer.target : transfer.source;
    if (numel(box) > 0) {
      const int64_t position = targets ? transfer.src : transfer.dst;
      entries.push_back({rank_of.at(position), &box});
    }
  }
  std::stable_sort(
      entries.begin(),
      entries.end(),
      [](const BoxOfPeer& a, const BoxOfPeer& b) { return a.peer < b.peer; });
  return entries;
}

void write_side(
    std::vector<int64_t>& code,
    const std::vector<int64_t>& sizes,
    std::vector<BoxOfPeer> entries,
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
  const auto largest = reader.next();
  result.largest_message =
      largest == kNotKnown ? std::nullopt : std::optional(largest);
  result.peers = reader.next();
  result.channels_last = reader.next() != 0;
  result.gathers = reader.next() != 0;
  reader.next(); // the source side's length, for adjoint()
  result.source = read_side(reader, result.ranks);
  result.target = read_side(reader, result.ranks);
  TORCH_CHECK_VALUE(
      reader.done(), "shardtensor::exchange: the code is too long");
  const auto dims = result.source.sizes.size();
  TORCH_CHECK_VALUE(
      !result.channels_last ||
          ((dims == 4 || dims == 5) && dims == result.target.sizes.size()),
      "shardtensor::exchange: the code has channels last of tensors from ",
      result.source.sizes,
      " to ",
      result.target.sizes,
      ", expected 4 or 5 dims");
  TORCH_CHECK_VALUE(
      !result.gathers ||
          product(result.target.sizes) ==
              result.ranks * product(result.source.sizes),
      "shardtensor::exchange: the code gathers ",
      result.source.sizes,
      " of ",
      result.ranks,
      " ranks into ",
      result.target.sizes,
      ", expected room for all");
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
  result[kGathers] = 0; // it scatters
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
  std::vector<int64_t> code{
      rank,
      *last + 1,
      plan.largest_message.value_or(kNotKnown),
      plan.peers,
      0,
      plan.gathers ? 1 : 0,
      0};
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

bool is_channels_last(at::MemoryFormat format) {
  return format == at::MemoryFormat::ChannelsLast ||
      format == at::MemoryFormat::ChannelsLast3d;
}

EncodedExchange in_format(
    const EncodedExchange& encoded,
    at::MemoryFormat format) {
  EncodedExchange result = encoded;
  if (!result.code.empty()) {
    result.code[kChannelsLast] = is_channels_last(format) ? 1 : 0;
  }
  return result;
}

std::vector<int64_t> in_order_of_memory(c10::IntArrayRef code) {
  auto result = code.vec();
  if (decode(code).channels_last) {
    put_channels_of_side_last(
        put_channels_of_side_last(result.data() + kHeader));
  }
  return result;
}

at::DimVector in_order_of_dims(c10::IntArrayRef sizes) {
  at::DimVector result(sizes.begin(), sizes.end());
  std::rotate(result.begin() + 1, result.end() - 1, result.end());
  return result;
}

EncodedExchange encode(ExchangePlan plan, const Group& group) {
  std::vector<int64_t> ranks(group.ranks());
  std::iota(ranks.begin(), ranks.end(), 0);
  if (ranks.size() == 1) {
    plan.largest_message = 0;
  }
  return {encode(plan, group.rank(), ranks), group.name()};
}

Box whole_box(c10::IntArrayRef sizes) {
  Box box;
  for (const auto size : sizes) {
    box.push_back({0, size});
  }
  return box;
}

Box box_of_rows(
    c10::IntArrayRef sizes,
    int64_t dim,
    int64_t begin,
    int64_t end) {
  Box box = whole_box(sizes);
  box[dim] = {begin, end};
  return box;
}

} // namespace shardtensor::detail
