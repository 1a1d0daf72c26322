#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <c10/core/MemoryFormat.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/layout/plans/transfer.h"

namespace shardtensor::detail {

/// One box of a local tensor, with the rank of the group that it goes to or
/// comes from; the peer may be this rank.
struct MessageBox {
  int64_t peer = 0;
  bool adds = false; // as a target: an earlier piece wrote some of it
  c10::IntArrayRef begin;
  c10::IntArrayRef extent;
  int64_t numel = 0;
};

/// The local tensor before or after an exchange. Pieces stand by peer, within
/// a peer in message order; the k-th piece of this rank's source side moves to
/// the k-th piece of its target side.
struct MessageSide {
  c10::IntArrayRef sizes;
  bool starts_at_zero = false; // pieces do not write every element
  // Several peers write one element: sum in rank order, so that every rank
  // that holds a copy of it gets the same bits. Otherwise each element has at
  // most one writer besides this rank, and order does not matter.
  bool in_rank_order = false;
  std::vector<MessageBox> pieces;

  /// The pieces of one peer.
  c10::ArrayRef<MessageBox> of(int64_t peer) const;
};

/// An ExchangePlan seen from a process group, as a view of the integers that
/// carry it through the dispatcher. The adjoint swaps the two sides.
///
/// Layout: rank, ranks of the group, largest message (-1: not known), peers,
/// whether channels are last, whether it gathers, length of the source side;
/// then per side its dim, flags, number of pieces, sizes, and per piece its
/// peer, flag, begin, extent.
struct ExchangeCode {
  int64_t rank = 0; // -1: none of the group
  int64_t ranks = 0;
  std::optional<int64_t> largest_message = 0; // elements; see ExchangePlan
  int64_t peers = -1; // see there
  bool channels_last = false; // see Note [Boxes with channels last]
  bool gathers = false; // see ExchangePlan
  MessageSide source;
  MessageSide target;
};

/// A view: `code` must outlive it. Raises on integers that are no code.
ExchangeCode decode(c10::IntArrayRef code);

/// The code of the adjoint exchange.
std::vector<int64_t> adjoint(c10::IntArrayRef code);

// Note [Boxes with channels last]
// Boxes of tensors whose channels lie last in memory would be transposed into
// row-major buffers and back, and rows of one sample, one run of memory, be
// copied. So a code may say that its boxes travel with dim 1 behind the others.
// All ranks must say so alike: what decides is the format that a ShardTensor
// shows, never how a piece of it lies.

bool is_channels_last(at::MemoryFormat format);

/// The same exchange for tensors of this format, channels last or any other.
EncodedExchange in_format(
    const EncodedExchange& encoded,
    at::MemoryFormat format);

/// The same code with dim 1 of sizes and boxes behind the others, where its
/// channels are last.
std::vector<int64_t> in_order_of_memory(c10::IntArrayRef code);

/// Sizes of such a code, with dim 1 where tensors have it.
at::DimVector in_order_of_dims(c10::IntArrayRef sizes);

/// The plan for the rank `rank` of a group in which a position's rank is
/// `rank_of(position)`.
std::vector<int64_t> encode(
    const ExchangePlan& plan,
    int64_t rank,
    const std::vector<int64_t>& rank_of);

/// The same among all ranks of a group, whose ranks are the plan's positions.
EncodedExchange encode(ExchangePlan plan, const Group& group);

/// All of a tensor of these sizes.
Box whole_box(c10::IntArrayRef sizes);
/// Its rows [begin, end) of dim.
Box box_of_rows(
    c10::IntArrayRef sizes,
    int64_t dim,
    int64_t begin,
    int64_t end);

} // namespace shardtensor::detail
