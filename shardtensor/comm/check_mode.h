#pragma once

namespace shardtensor {

/// With the check mode on, ranks compare a hash of (operator, CommScope, plan
/// shape or sizes, dtype) before each collective; a mismatch raises the same
/// error on every rank, with each rank's description, instead of hanging.
void set_check_mode(bool on);
bool check_mode();

} // namespace shardtensor
