#pragma once

// The two primitives that everything else is made of. Both are functional
// TORCH_LIBRARY operators on plain local tensors (shardtensor::exchange,
// shardtensor::all_reduce), differentiable to any order, seen by torch.compile
// as one node. Thread safety / ordering: every rank of the group calls them in
// the same order. Errors name the operator under way (CommScope), this rank,
// its peers and the group.

#include "shardtensor/comm/check_mode.h" // set_check_mode
#include "shardtensor/comm/primitives/all_reduce.h" // all_reduce
#include "shardtensor/comm/primitives/exchange.h" // exchange, encode, adjoint
#include "shardtensor/comm/scope.h" // CommScope
#include "shardtensor/comm/stats.h" // comm_stats
#include "shardtensor/comm/wait.h" // set_communication_timeout, set_wait_hooks
