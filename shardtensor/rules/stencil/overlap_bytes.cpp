#include "shardtensor/rules/stencil/overlap_bytes.h"

#include <c10/util/Exception.h>

#include "shardtensor/threads/setting.h"

namespace shardtensor {
namespace {

constexpr int64_t kByDevice = -1;
Setting<int64_t> current{"conv_overlap_bytes", kByDevice};

} // namespace

void set_conv_overlap_bytes(std::optional<int64_t> bytes) {
  TORCH_CHECK_VALUE(
      bytes.value_or(0) >= 0,
      "conv_overlap_bytes: expected a number of bytes or none, got ",
      bytes.value_or(0));
  current = bytes.value_or(kByDevice);
}

std::optional<int64_t> conv_overlap_bytes() {
  const int64_t bytes = current;
  return bytes == kByDevice ? std::nullopt : std::optional(bytes);
}

} // namespace shardtensor
