#pragma once

#include <cstdint>

#include <c10/util/Exception.h>

namespace shardtensor::detail {

/// `index`, which must be in [0, end): "Mesh: axis 3, expected 0 <= axis < 2".
inline int64_t in_range(
    const char* owner,
    const char* name,
    int64_t index,
    int64_t end) {
  TORCH_CHECK_INDEX(
      index >= 0 && index < end,
      owner,
      ": ",
      name,
      " ",
      index,
      ", expected 0 <= ",
      name,
      " < ",
      end);
  return index;
}

} // namespace shardtensor::detail
