#pragma once

#include <cstdint>
#include <optional>

namespace shardtensor {

/// A convolution whose input has at least so many bytes per rank, on average,
/// computes while its neighbours' rows travel, and computes the outputs that
/// read them again; a smaller one waits and joins the rows to its own, which
/// takes fewer calls but a copy of the input. std::nullopt, the default: what
/// the device and the dtype ask for. For all calls of the process from now on,
/// the same on all ranks. Raises on a negative number.
void set_conv_overlap_bytes(std::optional<int64_t> bytes);
std::optional<int64_t> conv_overlap_bytes();

} // namespace shardtensor
