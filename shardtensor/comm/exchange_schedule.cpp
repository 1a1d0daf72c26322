#include "shardtensor/comm/exchange_schedule.h"

#include <algorithm>

#include "shardtensor/layout/plan_cache.h"

namespace shardtensor::detail {

namespace {

// Small exchanges take one round. Large ones take several, each with a few
// peers, so that no buffer holds more than a part of the tensor.
constexpr int64_t kBytesPerRound = 4 << 20;
constexpr int64_t kMostRounds = 8;

// A plan of very many boxes takes longer to carry out than to read.
constexpr size_t kLongestKept = 1024; // integers

Messages messages(
    const MessageSide& side,
    std::vector<int64_t> peers,
    int64_t ranks) {
  Messages result;
  result.splits.assign(ranks, 0);
  std::sort(peers.begin(), peers.end());
  for (const auto peer : peers) {
    for (const auto& piece : side.of(peer)) {
      result.pieces.push_back(piece);
      result.splits[peer] += piece.numel;
      result.numel += piece.numel;
      result.adds |= piece.adds;
    }
  }
  return result;
}

std::vector<Round> rounds_of(const ExchangeCode& code, int64_t element_size) {
  const int64_t peers = code.ranks - 1;
  const int64_t bytes = code.largest_message * peers * element_size;
  const int64_t count = std::clamp<int64_t>(
      bytes / kBytesPerRound, 1, std::clamp<int64_t>(peers, 1, kMostRounds));
  std::vector<std::vector<int64_t>> send_to(count);
  std::vector<std::vector<int64_t>> receive_from(count);
  for (int64_t k = 1; k <= peers; ++k) {
    const auto round = (k - 1) * count / peers;
    send_to[round].push_back((code.rank + k) % code.ranks);
    receive_from[round].push_back((code.rank - k + code.ranks) % code.ranks);
  }
  std::vector<Round> rounds;
  for (int64_t round = 0; round < count; ++round) {
    rounds.push_back(
        {messages(code.source, send_to[round], code.ranks),
         messages(code.target, receive_from[round], code.ranks)});
  }
  return rounds;
}

Splits totals(const MessageSide& side, const ExchangeCode& code) {
  Splits result(code.ranks, 0);
  for (const auto& piece : side.pieces) {
    if (piece.peer != code.rank) {
      result[piece.peer] += piece.numel;
    }
  }
  return result;
}

} // namespace

ExchangeSchedule::ExchangeSchedule(
    c10::IntArrayRef integers,
    int64_t element_size,
    bool adds)
    : integers(integers.vec()), code(decode(this->integers)) {
  for (auto& piece : code.target.pieces) {
    piece.adds |= adds;
  }
  sent = totals(code.source, code);
  received = totals(code.target, code);
  if (code.largest_message > 0) {
    rounds = rounds_of(code, element_size);
  }
}

std::shared_ptr<const ExchangeSchedule> find_schedule(
    c10::IntArrayRef code,
    int64_t element_size,
    bool adds) {
  const auto make = [&] { return ExchangeSchedule(code, element_size, adds); };
  if (code.size() > kLongestKept) {
    return std::make_shared<const ExchangeSchedule>(make());
  }
  static PlanCache<ExchangeSchedule> schedules;
  PlanKey key;
  key.add(element_size).add(static_cast<int64_t>(adds)).add(code);
  return schedules.find(key, make);
}

} // namespace shardtensor::detail
