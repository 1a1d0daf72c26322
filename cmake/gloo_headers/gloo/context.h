#pragma once

// torch's ProcessGroupGloo.hpp includes headers of gloo that torch does not
// ship. It only names their types behind pointers, so that these declarations
// are enough to make a group; the code is inside libtorch.

#include <chrono>

namespace gloo {
class Context {
 public:
  void setTimeout(std::chrono::milliseconds);
};
} // namespace gloo
