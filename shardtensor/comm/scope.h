#pragma once

#include <string>

namespace shardtensor {

/// What the innermost CommScope of this thread names; empty outside any.
const std::string& current_comm_scope();

/// How the scope of a forward is called in its backward.
std::string backward_of(const std::string& scope);

} // namespace shardtensor
