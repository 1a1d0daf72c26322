#include "shardtensor/comm/scope.h"

#include <utility>

#include "shardtensor/comm/collectives.h"

namespace shardtensor {

namespace {
thread_local std::string current;
}

const std::string& current_comm_scope() {
  return current;
}

CommScope::CommScope(std::string what)
    : outer_(std::exchange(current, std::move(what))) {}

CommScope::~CommScope() {
  current = std::move(outer_);
}

} // namespace shardtensor
