#include "shardtensor/comm/primitives/exchange_schedule.h"

#include <algorithm>

#include <ATen/ops/tensor.h>

#include "shardtensor/comm/primitives/box_rows.h"
#include "shardtensor/layout/plans/plan_cache.h"

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
constexpr size_t kLongestKept = 8192; // integers

// Note [Boxes by one kernel]
// On a device one kernel is faster as soon as launching one for each box takes
// longer. On the host calling an operator for each does: four boxes of up to
// 8192 numbers are packed in 0.2 to 0.6 of the time, and written in as much up
// to 2048; from 8192 on writing may take longer. benchmarks/cpp/boxes.cpp
// measures it.
constexpr int64_t kManyBoxesOnDevice = 8;
constexpr int64_t kManyBoxesOnHost = 4;
constexpr int64_t kSmallToPackOnHost = 8192; // elements of a box, on average
constexpr int64_t kSmallToWriteOnHost = 2048;
constexpr int64_t kMostRows = 1 << 20; // 8 MB of indices

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
  const int64_t others = std::max<int64_t>(code.ranks - 1, 1);
  const int64_t peers =
      code.peers < 0 ? others : std::clamp<int64_t>(code.peers - 1, 1, others);
  if (!code.largest_message) {
    return 1; // ranks cannot agree on more
  }
  const int64_t bytes = *code.largest_message * peers * element_size;
  // More rounds than peers would be empty ones.
  return std::clamp<int64_t>(
      bytes / bytes_per_round, 1, std::min(peers, kMostRounds));
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

Messages messages_of(c10::ArrayRef<MessageBox> pieces) {
  Messages result;
  for (const auto& piece : pieces) {
    add(result, piece);
  }
  return result;
}

void set_rows(Messages& messages, const BoxRows& found, at::Device device) {
  messages.rows =
      at::tensor(found.rows, at::TensorOptions(at::kLong)).to(device);
  messages.row_length = found.length;
}

/// True where one kernel is faster.
bool take_one_kernel(
    const Messages& messages,
    int64_t small_on_host,
    at::Device device) {
  const auto boxes = static_cast<int64_t>(messages.pieces.size());
  return device.is_cpu()
      ? boxes >= kManyBoxesOnHost && messages.numel <= boxes * small_on_host
      : boxes >= kManyBoxesOnDevice;
}

void find_rows_to_pack(
    Messages& messages,
    c10::IntArrayRef sizes,
    at::Device device) {
  if (!take_one_kernel(messages, kSmallToPackOnHost, device)) {
    return;
  }
  if (const auto found = rows_of(sizes, messages.pieces, kMostRows)) {
    set_rows(messages, *found, device);
  }
}

/// Where some boxes are written and others added, or two are added to one
/// element, they go in order, box by box; on the host wherever they add.
void find_rows_to_write(
    Messages& messages,
    c10::IntArrayRef sizes,
    at::Device device) {
  const auto& pieces = messages.pieces;
  const bool mixed =
      std::any_of(pieces.begin(), pieces.end(), [&](const auto& piece) {
        return piece.adds != messages.adds;
      });
  if (mixed || (messages.adds && device.is_cpu()) ||
      !take_one_kernel(messages, kSmallToWriteOnHost, device)) {
    return;
  }
  const auto found = rows_of(sizes, pieces, kMostRows);
  if (found && found->distinct) {
    set_rows(messages, *found, device);
  }
}

template <typename Element>
int64_t bytes_in(const std::vector<Element>& elements) {
  return static_cast<int64_t>(elements.size() * sizeof(Element));
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
    at::Device device)
    : integers(in_order_of_memory(integers)), code(decode(this->integers)) {
  for (auto& piece : code.target.pieces) {
    piece.adds |= adds;
  }
  sent = totals(code.source, code);
  received = totals(code.target, code);
  if (code.largest_message != 0) {
    rounds = rounds_of(
        code,
        element_size,
        device.is_cpu() ? kBytesPerRoundOnHost : kBytesPerRoundOnDevice);
  }
  own_source = messages_of(code.source.of(code.rank));
  own_target = messages_of(code.target.of(code.rank));
  if (integers.size() > kLongestKept) {
    return; // they would not be used again
  }
  for (auto& round : rounds) {
    find_rows_to_pack(round.sends, code.source.sizes, device);
    find_rows_to_write(round.receives, code.target.sizes, device);
  }
  find_rows_to_pack(own_source, code.source.sizes, device);
  find_rows_to_write(own_target, code.target.sizes, device);
}

int64_t Messages::bytes() const {
  return bytes_in(pieces) + bytes_in(splits) +
      (rows.defined() ? static_cast<int64_t>(rows.nbytes()) : 0);
}

int64_t ExchangeSchedule::bytes() const {
  int64_t result = static_cast<int64_t>(sizeof(*this)) + bytes_in(integers) +
      bytes_in(code.source.pieces) + bytes_in(code.target.pieces) +
      own_source.bytes() + own_target.bytes();
  for (const auto& round : rounds) {
    result += round.sends.bytes() + round.receives.bytes();
  }
  return result;
}

std::shared_ptr<const ExchangeSchedule> find_schedule(
    c10::IntArrayRef code,
    const at::Tensor& x,
    bool adds) {
  const auto element_size = static_cast<int64_t>(x.element_size());
  const auto device = x.device();
  const auto make = [&] {
    return ExchangeSchedule(code, element_size, adds, device);
  };
  if (code.size() > kLongestKept) {
    return std::make_shared<const ExchangeSchedule>(make());
  }
  static PlanCache<ExchangeSchedule> schedules;
  PlanKey key;
  key.add(element_size)
      .add(static_cast<int64_t>(adds))
      .add(static_cast<int64_t>(device.type()))
      .add(static_cast<int64_t>(device.index()))
      .add(code);
  return schedules.find(key, make);
}

} // namespace shardtensor::detail
