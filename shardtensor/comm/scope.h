#pragma once

#include <string>

namespace shardtensor {

/// Names what is being computed while it is alive, for error messages, the
/// profiler and the check mode: CommScope scope("aten::conv2d", spec text).
class CommScope {
 public:
  explicit CommScope(std::string what);
  ~CommScope();
  CommScope(const CommScope&) = delete;
  CommScope& operator=(const CommScope&) = delete;

 private:
  std::string outer_;
};

/// What the innermost CommScope of this thread names; empty outside any.
const std::string& current_comm_scope();

/// How the scope of a forward is called in its backward.
std::string backward_of(const std::string& scope);

} // namespace shardtensor
