#pragma once

#include <malloc.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>

/// Bytes beyond what the process held when this was made, resident memory; what
/// a GPU holds is not seen. As examples/python/memory.py measures it: the
/// kernel keeps the mark, so no peak between two looks is missed. One at a
/// time.
class PeakMemory {
 public:
  PeakMemory() {
    malloc_trim(0); // what was freed before shall not count as held
    std::ofstream("/proc/self/clear_refs") << 5;
    before_ = peak();
  }

  int64_t added() const {
    return peak() - before_;
  }

  /// All that the process held at the peak.
  static int64_t peak() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmHWM:")) {
        return std::strtoll(line.c_str() + 6, nullptr, 10) * 1024;
      }
    }
    return 0;
  }

 private:
  int64_t before_;
};
