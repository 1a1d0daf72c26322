#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace shardtensor::detail {

/// join({6, 4}, ", ") is "6, 4".
template <class T>
std::string join(const std::vector<T>& items, const char* separator = ", ") {
  std::ostringstream out;
  for (size_t i = 0; i < items.size(); ++i) {
    out << (i == 0 ? "" : separator) << items[i];
  }
  return out.str();
}

} // namespace shardtensor::detail
