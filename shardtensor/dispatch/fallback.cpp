#include "shardtensor/dispatch/fallback.h"

#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "shardtensor/dispatch/labels.h"
#include "shardtensor/layout/enum_words.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/threads/setting.h"

namespace shardtensor {

using namespace detail;
namespace {

Setting<FallbackMode> mode{"fallback_mode", FallbackMode::Warn};

constexpr EnumWords<FallbackMode, 3> kFallbackModes{
    "fallback mode",
    {{
        {FallbackMode::Error, "error"},
        {FallbackMode::Warn, "warn"},
        {FallbackMode::Silent, "silent"},
    }}};

struct Counts {
  std::mutex mutex;
  std::map<std::string, FallbackCount> by_op;
  std::set<std::string> said;
};

Counts& counts() {
  static Counts instance;
  return instance;
}

void count(const std::string& op, int64_t elements) {
  auto& state = counts();
  std::lock_guard<std::mutex> lock(state.mutex);
  auto& entry = state.by_op[op];
  entry.op = op;
  entry.calls += 1;
  entry.elements += elements;
}

/// True once for an operator and placements, whatever the sizes.
bool is_new(const std::string& op, const SpecPtr& spec) {
  std::ostringstream said;
  said << op;
  for (const auto& placement : spec->placements()) {
    said << ' ' << placement;
  }
  auto& state = counts();
  std::lock_guard<std::mutex> lock(state.mutex);
  return state.said.insert(said.str()).second;
}

} // namespace

void set_fallback_mode(FallbackMode value) {
  mode = value;
}

FallbackMode fallback_mode() {
  return mode;
}

const char* to_string(FallbackMode value) {
  return kFallbackModes.word(value);
}

FallbackMode parse_fallback_mode(const std::string& name) {
  return kFallbackModes.parse(name);
}

std::vector<FallbackCount> fallback_counts() {
  auto& state = counts();
  std::lock_guard<std::mutex> lock(state.mutex);
  std::vector<FallbackCount> result;
  for (const auto& item : state.by_op) {
    result.push_back(item.second);
  }
  return result;
}

void reset_fallback_counts() {
  auto& state = counts();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.by_op.clear();
  state.said.clear();
}

void note_fallback(
    const std::string& op,
    const SpecPtr& spec,
    const SpecPtr& wanted) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      fallback_mode() != FallbackMode::Error,
      op,
      " has no rule for ",
      to_string(*spec),
      " and would gather it (fallback mode 'error')");
  const auto elements = redistribute_cost(spec, wanted);
  count(op, elements);
  if (fallback_mode() == FallbackMode::Warn && is_new(op, spec)) {
    TORCH_WARN(
        op,
        " has no rule for ",
        to_string(*spec),
        ": redistributing it to ",
        to_string(*wanted),
        ", ",
        elements,
        " elements over all ranks. The result is right, but costs "
        "communication and memory. Said once.");
  }
}

void run_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Call call(op, *stack);
  for (const auto& operand : call.operands()) {
    if (operand.spec && operand.spec->is_sharded()) {
      note_fallback(call.name(), operand.spec, replicated(operand.spec));
    }
  }
  run_rule(op, replicate_rule, stack);
}

} // namespace shardtensor
