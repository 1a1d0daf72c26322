#include "shardtensor/comm/scope.h"

#include <utility>

namespace shardtensor {

namespace {
thread_local std::string current;
}

const std::string& current_comm_scope() {
  return current;
}

std::string backward_of(const std::string& scope) {
  return scope.empty() ? "backward" : "the backward of " + scope;
}

CommScope::CommScope(std::string what)
    : outer_(std::exchange(current, std::move(what))) {}

CommScope::~CommScope() {
  current = std::move(outer_);
}

} // namespace shardtensor
