#include "shardtensor/comm/exchange_schedule.h"

#include <algorithm>

#include "shardtensor/layout/plan_cache.h"

namespace shardtensor::detail {

namespace {

// Small exchanges take one round. Large ones take several, each with a few
// peers, so that no buffer holds more than a part of the tensor.
// Links between devices move a hundred times as much while a round is started,
// and only the first round runs beside a computation.
constexpr int64_t kBytesPerRoundOnHost = 4 << 20;
constexpr int64_t kBytesPerRoundOnDevice = 256 << 20;
constexpr int64_t kMostRounds = 8;

// A plan of very many boxes takes longer to carry out than to read.
constexpr size_t kLongestKept = 1024; // integers

void add(Splits& splits, const MessageBox& piece) {
  if (splits.empty() || splits.back().rank != piece.peer) {
    splits.push_back({piece.peer, 0});
  }
  splits.back().elements += piece.numel;
}

void add(Messages& messages, const MessageBox& piece) {
  messages.pieces.push_back(piece);
  add(messages.splits, piece);
  messages.numel += piece.numel;
  messages.adds |= piece.adds;
}

int64_t count_rounds(
    const ExchangeCode& code,
    int64_t element_size,
    int64_t bytes_per_round) {
  const int64_t others = code.ranks - 1;
  const int64_t peers = code.peers < 0 ? others : std::min(code.peers, others);
  const int64_t bytes = code.largest_message * peers * element_size;
  return std::clamp<int64_t>(
      bytes / bytes_per_round, 1, std::clamp<int64_t>(others, 1, kMostRounds));
}

std::vector<Round> rounds_of(
    const ExchangeCode& code,
    int64_t element_size,
    int64_t bytes_per_round) {
  const int64_t others = code.ranks - 1;
  std::vector<Round> rounds(count_rounds(code, element_size, bytes_per_round));
  const auto count = static_cast<int64_t>(rounds.size());
  // Of the peers that are `distance` ranks further or before.
  const auto round_of = [&](int64_t distance) -> Round& {
    return rounds[((distance + code.ranks) % code.ranks - 1) * count / others];
  };
  for (const auto& piece : code.source.pieces) {
    if (piece.peer != code.rank) {
      add(round_of(piece.peer - code.rank).sends, piece);
    }
  }
  for (const auto& piece : code.target.pieces) {
    if (piece.peer != code.rank) {
      add(round_of(code.rank - piece.peer).receives, piece);
    }
  }
  return rounds;
}

Splits totals(const MessageSide& side, const ExchangeCode& code) {
  Splits result;
  for (const auto& piece : side.pieces) {
    if (piece.peer != code.rank) {
      add(result, piece);
    }
  }
  return result;
}

} // namespace

ExchangeSchedule::ExchangeSchedule(
    c10::IntArrayRef integers,
    int64_t element_size,
    bool adds,
    bool on_host)
    : integers(integers.vec()), code(decode(this->integers)) {
  for (auto& piece : code.target.pieces) {
    piece.adds |= adds;
  }
  sent = totals(code.source, code);
  received = totals(code.target, code);
  if (code.largest_message > 0) {
    rounds = rounds_of(
        code,
        element_size,
        on_host ? kBytesPerRoundOnHost : kBytesPerRoundOnDevice);
  }
}

std::shared_ptr<const ExchangeSchedule> find_schedule(
    c10::IntArrayRef code,
    const at::Tensor& x,
    bool adds) {
  const auto element_size = static_cast<int64_t>(x.element_size());
  const bool on_host = x.is_cpu();
  const auto make = [&] {
    return ExchangeSchedule(code, element_size, adds, on_host);
  };
  if (code.size() > kLongestKept) {
    return std::make_shared<const ExchangeSchedule>(make());
  }
  static PlanCache<ExchangeSchedule> schedules;
  PlanKey key;
  key.add(element_size)
      .add(static_cast<int64_t>(adds) * 2 + static_cast<int64_t>(on_host))
      .add(code);
  return schedules.find(key, make);
}

} // namespace shardtensor::detail
