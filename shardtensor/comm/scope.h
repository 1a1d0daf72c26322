#pragma once

#include <string>

namespace shardtensor {

/// What the innermost CommScope of this thread names; empty outside any.
const std::string& current_comm_scope();

} // namespace shardtensor
