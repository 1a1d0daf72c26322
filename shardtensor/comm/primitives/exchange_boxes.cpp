#include "shardtensor/comm/primitives/exchange_boxes.h"

#include <algorithm>

#include <ATen/ops/empty.h>

namespace shardtensor::detail {

namespace {

template <typename Visit>
void for_each_piece(
    const at::Tensor& buffer,
    const Messages& messages,
    Visit visit) {
  int64_t offset = 0;
  for (const auto& piece : messages.pieces) {
    const bool whole = piece.numel == buffer.numel();
    const at::Tensor place =
        whole ? buffer : buffer.narrow(0, offset, piece.numel);
    visit(piece, place.view(piece.extent));
    offset += piece.numel;
  }
}

/// PyTorch's kernels for rows know these on every device.
bool has_row_kernels(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

/// x as rows of the length that the boxes are made of; undefined where they go
/// one by one.
at::Tensor as_rows(const at::Tensor& x, const Messages& messages) {
  return messages.rows.defined() && x.is_contiguous() &&
          has_row_kernels(x.scalar_type())
      ? x.view({-1, messages.row_length})
      : at::Tensor();
}

} // namespace

/// In one operation; decode() has checked that the box lies within.
at::Tensor box_of(const at::Tensor& x, const MessageBox& piece) {
  if (piece.extent == x.sizes()) {
    return x;
  }
  int64_t offset = x.storage_offset();
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    offset += piece.begin[dim] * x.stride(dim);
  }
  return x.as_strided(piece.extent, x.strides(), offset);
}

void write_box(
    const at::Tensor& target,
    const MessageBox& piece,
    const at::Tensor& x) {
  at::Tensor destination = box_of(target, piece);
  if (piece.adds) {
    destination.add_(x);
  } else {
    destination.copy_(x);
  }
}

void copy_own(
    const at::Tensor& target,
    const at::Tensor& x,
    const ExchangeSchedule& schedule) {
  const auto& from = schedule.own_source;
  const auto& to = schedule.own_target;
  if (as_rows(x, from).defined() && as_rows(target, to).defined()) {
    unpack(target, pack(x, from), to);
    return;
  }
  for (size_t i = 0; i < from.pieces.size(); ++i) {
    write_box(target, to.pieces[i], box_of(x, from.pieces[i]));
  }
}

at::Tensor in_place_buffer(const at::Tensor& x, const Messages& messages) {
  if (messages.pieces.size() != 1) {
    return {};
  }
  const at::Tensor box = box_of(x, messages.pieces[0]);
  return box.is_contiguous() ? box.view({-1}) : at::Tensor();
}

at::Tensor pack(const at::Tensor& x, const Messages& messages) {
  const at::Tensor in_place = in_place_buffer(x, messages);
  if (in_place.defined()) {
    return in_place;
  }
  const at::Tensor rows = as_rows(x, messages);
  if (rows.defined()) {
    return rows.index_select(0, messages.rows).view({-1});
  }
  at::Tensor buffer = at::empty({messages.numel}, x.options());
  for_each_piece(
      buffer, messages, [&](const MessageBox& piece, const at::Tensor& place) {
        place.copy_(box_of(x, piece));
      });
  return buffer;
}

void unpack(
    const at::Tensor& target,
    const at::Tensor& buffer,
    const Messages& messages) {
  at::Tensor rows = as_rows(target, messages);
  if (!rows.defined()) {
    for_each_piece(
        buffer, messages, [&](const MessageBox& piece, const at::Tensor& x) {
          write_box(target, piece, x);
        });
    return;
  }
  const auto from = buffer.view({-1, messages.row_length});
  if (messages.adds) {
    rows.index_add_(0, messages.rows, from);
  } else {
    rows.index_copy_(0, messages.rows, from);
  }
}

void write_in_rank_order(
    const at::Tensor& target,
    const at::Tensor& x,
    const ExchangeSchedule& schedule,
    const std::vector<Received>& received) {
  std::vector<std::pair<MessageBox, at::Tensor>> writes;
  for (const auto& r : received) {
    for_each_piece(
        r.buffer,
        r.messages,
        [&](const MessageBox& piece, const at::Tensor& box) {
          writes.emplace_back(piece, box);
        });
  }
  std::stable_sort(writes.begin(), writes.end(), [](auto& a, auto& b) {
    return a.first.peer < b.first.peer;
  });
  auto next = writes.begin();
  for (; next != writes.end() && next->first.peer < schedule.code.rank;
       ++next) {
    write_box(target, next->first, next->second);
  }
  copy_own(target, x, schedule);
  for (; next != writes.end(); ++next) {
    write_box(target, next->first, next->second);
  }
}

} // namespace shardtensor::detail
