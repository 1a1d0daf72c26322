#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

/// What happens where no rule can keep a tensor sharded: it is gathered to
/// Replicate, the operator runs on every rank, the result is right. Error
/// raises instead, Warn (the default) says it once per operator and layout.
enum class FallbackMode { Error, Warn, Silent };

void set_fallback_mode(FallbackMode mode);
FallbackMode fallback_mode();
/// "error", "warn", "silent".
FallbackMode parse_fallback_mode(const std::string& name);
const char* to_string(FallbackMode mode);

/// How often an operator fell back, and the elements that moved for it.
struct FallbackCount {
  std::string op;
  int64_t calls = 0;
  int64_t elements = 0;
};
std::vector<FallbackCount> fallback_counts();
void reset_fallback_counts();

/// Notes that `op` is about to move `spec` to `wanted` because it has no rule
/// for that layout; warns or raises by the mode. For rules that repair an
/// input in a way its user should know of.
void note_fallback(
    const std::string& op,
    const SpecPtr& spec,
    const SpecPtr& wanted);

/// Runs an operator that has no rule.
void run_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace shardtensor
