#include "shardtensor/dispatch/nominal_strides.h"

#include <algorithm>
#include <numeric>

#include <c10/core/MemoryFormat.h>

#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using Dims = std::vector<int64_t>;

/// What the call asks for; Preserve where it asks for nothing.
at::MemoryFormat asked_format(const Call& call) {
  const auto& arguments = call.op().schema().arguments();
  if (arguments.empty() || arguments.back().name() != "memory_format" ||
      call.argument(arguments.size() - 1).isNone()) {
    return at::MemoryFormat::Preserve;
  }
  return static_cast<at::MemoryFormat>(
      call.argument(arguments.size() - 1).toInt());
}

/// Channels-last if a ShardTensor among the operands is.
at::MemoryFormat operands_format(const Call& call) {
  for (const auto& operand : call.operands()) {
    if (!operand.tensor.is_contiguous() && is_shard_tensor(operand.tensor)) {
      for (const auto format :
           {at::MemoryFormat::ChannelsLast, at::MemoryFormat::ChannelsLast3d}) {
        if (operand.tensor.is_contiguous(format)) {
          return format;
        }
      }
    }
  }
  return at::MemoryFormat::Contiguous;
}

// ---- as TensorIterator has it -----------------------------------------------

template <class Holds>
bool all_of(at::ArrayRef<at::Tensor> operands, const Holds& holds) {
  return std::all_of(operands.begin(), operands.end(), holds);
}

/// Aligned at the last dims; 0 where the operand is broadcast.
Dims broadcast_strides(const at::Tensor& operand, const Dims& sizes) {
  Dims strides(sizes.size());
  const auto shift = sizes.size() - operand.dim();
  for (int64_t dim = 0; dim < operand.dim(); ++dim) {
    if (operand.size(dim) != 1 || sizes[dim + shift] == 1) {
      strides[dim + shift] = operand.stride(dim);
    }
  }
  return strides;
}

/// Positive: `a`, inside of `b` until now, belongs outside. Zero: no operand
/// tells.
int compare_dims(
    const std::vector<Dims>& strides,
    const Dims& sizes,
    int64_t a,
    int64_t b) {
  for (const auto& own : strides) {
    if (own[a] == 0 || own[b] == 0) {
      continue;
    }
    if (own[a] != own[b]) {
      return own[a] < own[b] ? -1 : 1;
    }
    if (sizes[a] > sizes[b]) {
      return 1;
    }
  }
  return 0;
}

} // namespace

Dims memory_order(const std::vector<Dims>& strides, const Dims& sizes) {
  Dims order(sizes.size());
  std::iota(order.rbegin(), order.rend(), 0);
  for (size_t i = 1; i < order.size(); ++i) {
    auto moving = i;
    for (size_t inner = i; inner-- > 0;) {
      const int told =
          compare_dims(strides, sizes, order[inner], order[moving]);
      if (told < 0) {
        break;
      }
      if (told > 0) {
        std::swap(order[inner], order[moving]);
        moving = inner;
      }
    }
  }
  return order;
}

Dims dense_strides(const Dims& order, const Dims& sizes) {
  Dims strides(sizes.size());
  int64_t next = 1;
  for (const auto dim : order) {
    strides[dim] = next;
    next *= sizes[dim];
  }
  return strides;
}

Dims elementwise_strides(at::ArrayRef<at::Tensor> operands, const Dims& sizes) {
  if (all_of(operands, has_row_major_strides) ||
      all_of(operands, [&](const auto& x) {
        return x.sizes() == at::IntArrayRef(sizes) && x.is_contiguous();
      })) {
    return {};
  }
  const auto& first = operands[0];
  if (all_of(operands, [&](const auto& x) {
        return x.sizes() == at::IntArrayRef(sizes) &&
            x.strides() == first.strides() && x.is_non_overlapping_and_dense();
      })) {
    return first.strides().vec();
  }
  std::vector<Dims> strides;
  for (const auto& operand : operands) {
    strides.push_back(broadcast_strides(operand, sizes));
  }
  return dense_strides(memory_order(strides, sizes), sizes);
}

Dims nominal_strides(
    const Call& call,
    StridesOf strides_of,
    const Dims& sizes) {
  const auto asked = asked_format(call);
  if (asked != at::MemoryFormat::Preserve) {
    return strides_of_format(asked, sizes);
  }
  return strides_of ? strides_of(call, sizes)
                    : strides_of_format(operands_format(call), sizes);
}

Dims strides_of_elements(const Call& call, const Dims& sizes) {
  c10::SmallVector<at::Tensor, 4> read;
  for (const auto& operand : call.operands()) {
    if (!operand.written) {
      read.push_back(operand.tensor);
    }
  }
  return elementwise_strides(read, sizes);
}

Dims strides_of_first(const Call& call, const Dims& sizes) {
  return elementwise_strides(call.operand(0).tensor, sizes);
}

Dims row_major_strides(const Call&, const Dims&) {
  return {};
}

} // namespace shardtensor::detail
