#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/comm/primitives/exchange_schedule.h"

namespace shardtensor::detail {

// Boxes of a tensor, and the flat buffers in which they travel. Tensors of any
// strides; those in row-major order take one kernel for many small boxes.

/// Of the same size as the piece.
at::Tensor box_of(const at::Tensor& x, const MessageBox& piece);

void write_box(
    const at::Tensor& target,
    const MessageBox& piece,
    const at::Tensor& x);

/// What stays on the rank.
void copy_own(
    const at::Tensor& target,
    const at::Tensor& x,
    const ExchangeSchedule& schedule);

/// Memory of x that is already the flat buffer of these messages, if they are
/// one contiguous box; else undefined.
at::Tensor in_place_buffer(const at::Tensor& x, const Messages& messages);

/// The flat buffer of these messages, which may be memory of x.
at::Tensor pack(const at::Tensor& x, const Messages& messages);

void unpack(
    const at::Tensor& target,
    const at::Tensor& buffer,
    const Messages& messages);

/// A received buffer that is still to be written.
struct Received {
  const Messages& messages;
  at::Tensor buffer;
};

/// Sums in rank order, this rank's own pieces among them.
void write_in_rank_order(
    const at::Tensor& target,
    const at::Tensor& x,
    const ExchangeSchedule& schedule,
    const std::vector<Received>& received);

} // namespace shardtensor::detail
