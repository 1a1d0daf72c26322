#include "shardtensor/threads/setting.h"

#include <array>
#include <atomic>

#include <c10/util/Exception.h>

namespace shardtensor {
namespace {

constexpr int64_t kMost = 32;

struct OfProcess {
  const char* name = nullptr;
  std::atomic<int64_t> value{0};
};

// Made while the library is loaded, by one thread.
struct Table {
  std::array<OfProcess, kMost> settings;
  int64_t count = 0;
};

Table& table() {
  static Table instance;
  return instance;
}

struct OfThread {
  uint32_t held = 0; // a bit for each setting
  std::array<int64_t, kMost> values{};

  bool holds(int64_t index) const {
    return (held >> index & 1) != 0;
  }
};
thread_local OfThread of_thread;

int64_t index_of(const std::string& name) {
  const auto& [settings, count] = table();
  for (int64_t index = 0; index < count; ++index) {
    if (name == settings[index].name) {
      return index;
    }
  }
  TORCH_CHECK_VALUE(false, "expected the name of a setting, got '", name, "'");
}

int64_t value_of(int64_t index) {
  return of_thread.holds(index) ? of_thread.values[index]
                                : table().settings[index].value.load();
}

} // namespace

IntegerSetting::IntegerSetting(const char* name, int64_t value)
    : index_(table().count++) {
  TORCH_INTERNAL_ASSERT(index_ < kMost);
  auto& setting = table().settings[index_];
  setting.name = name;
  setting.value = value;
}

int64_t IntegerSetting::get() const {
  return value_of(index_);
}

void IntegerSetting::set(int64_t value) {
  if (of_thread.holds(index_)) {
    of_thread.values[index_] = value;
  } else {
    table().settings[index_].value = value;
  }
}

std::optional<int64_t> hold_setting(const std::string& name) {
  const auto index = index_of(name);
  const auto now = value_of(index);
  const auto before =
      of_thread.holds(index) ? std::optional(now) : std::nullopt;
  of_thread.held |= uint32_t{1} << index;
  of_thread.values[index] = now;
  return before;
}

void release_setting(const std::string& name, std::optional<int64_t> before) {
  const auto index = index_of(name);
  if (before) {
    of_thread.values[index] = *before;
  } else {
    of_thread.held &= ~(uint32_t{1} << index);
  }
}

} // namespace shardtensor
