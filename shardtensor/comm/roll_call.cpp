#include "shardtensor/comm/roll_call.h"

#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace shardtensor {

namespace {

using Clock = std::chrono::steady_clock;
using Ranks = std::set<int64_t>;

constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kPause = std::chrono::milliseconds(50);

/// One key for all ranks: asking for it costs each rank the same in any group.
Ranks heard(c10d::Store& store, int64_t rank, size_t ranks) {
  const std::string key = "shardtensor/failed";
  const auto own = std::to_string(rank) + " ";
  store.append(key, {own.begin(), own.end()});
  const auto end = Clock::now() + kPatience;
  while (true) {
    const auto value = store.get(key);
    std::istringstream text(std::string(value.begin(), value.end()));
    Ranks found;
    for (int64_t one = 0; text >> one;) {
      found.insert(one);
    }
    if (found.size() == ranks || Clock::now() > end) {
      return found;
    }
    std::this_thread::sleep_for(kPause);
  }
}

std::string text_of_missing(const Ranks& found, int64_t ranks) {
  constexpr int64_t kShown = 16;
  std::string text;
  int64_t missing = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    if (found.count(rank) == 0 && missing++ < kShown) {
      text += c10::str(missing > 1 ? ", " : "", "rank ", rank);
    }
  }
  return text.empty()
      ? ""
      : c10::str(
            "; heard nothing from ", text, missing > kShown ? ", ..." : "");
}

/// A store whose host is gone holds up those that ask it for minutes: a thread
/// of its own does so, on a connection of its own.
std::future<Ranks> ask(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t ranks) {
  std::promise<Ranks> promise;
  auto found = promise.get_future();
  std::thread([=, answer = std::move(promise)]() mutable {
    try {
      answer.set_value(heard(*store->clone(), rank, ranks));
    } catch (...) {
      answer.set_exception(std::current_exception());
    }
  }).detach();
  return found;
}

} // namespace

namespace {

/// Null where it was destroyed.
c10::intrusive_ptr<c10d::ProcessGroup> group_named(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    return nullptr;
  }
}

} // namespace

std::string who_is_missing(const std::string& group) {
  const auto process_group = group_named(group);
  const auto store = process_group ? process_group->getStore() : nullptr;
  if (!store || !store->hasExtendedApi()) {
    return "";
  }
  const int64_t ranks = process_group->getSize();
  try {
    auto found = ask(store, process_group->getRank(), ranks);
    const auto status = found.wait_for(kPatience + std::chrono::seconds(1));
    if (status == std::future_status::ready) {
      return text_of_missing(found.get(), ranks);
    }
  } catch (const std::exception&) {
    // The same as no answer.
  }
  return "; the store of the group does not answer, either";
}

} // namespace shardtensor
