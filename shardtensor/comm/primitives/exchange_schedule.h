#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/exchange_code.h"

namespace shardtensor::detail {

/// The pieces that go to, or come from, some peers, in the order in which they
/// stand in one flat buffer.
struct Messages {
  std::vector<MessageBox> pieces;
  Splits splits;
  int64_t numel = 0;
  bool adds = false; // some piece does
  // Where there are many small pieces, these rows make up all of them, in
  // order: see BoxRows. int64, on the exchange's device.
  at::Tensor rows;
  int64_t row_length = 0;

  int64_t bytes() const;
};

/// Messages to r + k and from r - k for some k, so that every rank has as many
/// peers.
struct Round {
  Messages sends;
  Messages receives;
};

/// What a rank does in an exchange, worked out from its code once.
struct ExchangeSchedule {
  /// `adds`: what arrives, and what stays, is added to the target. `device`:
  /// where the tensors are.
  ExchangeSchedule(
      c10::IntArrayRef integers,
      int64_t element_size,
      bool adds,
      at::Device device = at::kCPU);
  ExchangeSchedule(ExchangeSchedule&&) = default;
  ExchangeSchedule(const ExchangeSchedule&) = delete;

  std::vector<int64_t> integers; // of the code, dims in the order of memory
  ExchangeCode code; // a view of them
  // The elements that go to and come from each other rank, all rounds together.
  Splits sent;
  Splits received;
  std::vector<Round> rounds; // as many on every rank
  // What stays on this rank, and where it goes.
  Messages own_source;
  Messages own_target;

  /// That it takes while it is kept.
  int64_t bytes() const;
};

/// Kept: the same exchange comes back in every step.
std::shared_ptr<const ExchangeSchedule> find_schedule(
    c10::IntArrayRef code,
    const at::Tensor& x,
    bool adds = false);

} // namespace shardtensor::detail
