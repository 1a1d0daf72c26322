#include "shardtensor/distributed/rendezvous.h"

#include <cstdlib>
#include <random>
#include <sstream>
#include <thread>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace shardtensor::detail {

namespace {

/// torchrun opens the store itself and says so.
bool launcher_has_store() {
  const char* value = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return value && std::string(value) == "True";
}

StorePtr connect(const Joining& joining) {
  const auto& launch = joining.launch;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.port);
  options.isServer = launch.rank == 0 && !launcher_has_store();
  options.numWorkers = static_cast<size_t>(launch.world_size);
  options.timeout = joining.limit;
  return c10::make_intrusive<c10d::TCPStore>(
      address_of_rank_0(launch), options);
}

// Note [Ranks that start again]
// torchrun starts all ranks again when one has died, on the store that it
// keeps, where those before have left their addresses.
// TORCHELASTIC_RESTART_COUNT does not tell the two apart: each node counts its
// own failures. So each process writes an id of its own under its rank; rank 0
// proposes a name together with the ids that it has read; each rank that finds
// its own id there agrees to that name; when all have, rank 0 says so. An id
// that a dead process left makes a proposal to which nobody agrees, until its
// successor has written another.

std::string random_id() {
  std::random_device bits;
  return c10::str(bits(), "-", bits(), "-", bits());
}

std::string joined(int64_t rank) {
  return c10::str("joined/", rank);
}

std::string agreed(const std::string& name, int64_t rank) {
  return c10::str("agreed/", name, "/", rank);
}

/// What `key_of(rank)` is for each rank.
template <class KeyOf>
std::vector<std::string> for_each_rank(int64_t ranks, const KeyOf& key_of) {
  std::vector<std::string> keys;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    keys.push_back(key_of(rank));
  }
  return keys;
}

/// Rank 0's part: one look at the store. Returns the name once all agree to it.
class Proposals {
 public:
  Proposals(c10d::Store& store, int64_t ranks)
      : store_(store), ranks_(ranks), own_(random_id()) {}

  std::string look() {
    if (!store_.check(for_each_rank(ranks_, joined))) {
      return {};
    }
    std::string ids;
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      ids += " " + store_.get_to_str(joined(rank));
    }
    if (ids != ids_) {
      ids_ = ids;
      name_ = c10::str(own_, ".", count_++);
      store_.set("proposal", name_ + ids);
    }
    const auto agreements = for_each_rank(
        ranks_, [&](int64_t rank) { return agreed(name_, rank); });
    if (!store_.check(agreements)) {
      return {};
    }
    store_.set("settled/" + name_, "");
    return name_;
  }

 private:
  c10d::Store& store_;
  int64_t ranks_;
  std::string own_;
  std::string ids_;
  std::string name_;
  int64_t count_ = 0;
};

/// One look at the store by a rank whose id is `id`.
std::string look_at_proposal(
    c10d::Store& store,
    int64_t rank,
    const std::string& id) {
  if (!store.check({"proposal"})) {
    return {};
  }
  std::istringstream words(store.get_to_str("proposal"));
  std::string name;
  std::string told;
  words >> name;
  for (int64_t i = 0; i <= rank; ++i) {
    words >> told;
  }
  if (!words || told != id) {
    return {};
  }
  store.set(agreed(name, rank), "");
  return store.check({"settled/" + name}) ? name : std::string();
}

std::string meet(const StorePtr& store, const Joining& joining) {
  c10d::PrefixStore place("shardtensor/meeting", store);
  const auto& launch = joining.launch;
  return agree_on_name(place, launch.rank, launch.world_size, joining.limit);
}

} // namespace

std::string agree_on_name(
    c10d::Store& store,
    int64_t rank,
    int64_t ranks,
    std::chrono::milliseconds limit) {
  const auto id = random_id();
  store.set(joined(rank), id);
  Proposals proposals(store, ranks);
  const auto end = std::chrono::steady_clock::now() + limit;
  while (std::chrono::steady_clock::now() < end) {
    // Rank 0 agrees to what it proposes, too.
    const auto settled = rank == 0 ? proposals.look() : std::string();
    const auto name = look_at_proposal(store, rank, id);
    if (!name.empty() && (rank != 0 || name == settled)) {
      return name;
    }
    // Thousands of ranks ask one store.
    std::this_thread::sleep_for(std::chrono::microseconds(5000 + 50 * ranks));
  }
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "DistributedManager: rank ",
          rank,
          " did not meet the other ranks of ",
          ranks,
          " in the launcher's store within ",
          limit.count(),
          " ms"));
}

StorePtr open_store(const Joining& joining) {
  const auto store = connect(joining);
  if (!launcher_has_store()) {
    return store;
  }
  return c10::make_intrusive<c10d::PrefixStore>(meet(store, joining), store);
}

StorePtr store_of_group(
    const StorePtr& store,
    const std::string& name,
    const std::vector<int64_t>& ranks) {
  return c10::make_intrusive<c10d::PrefixStore>(
      c10::str("shardtensor/", name, c10::IntArrayRef(ranks)), store);
}

} // namespace shardtensor::detail

std::string shardtensor::name_in_launchers_store(const Joining& joining) {
  using namespace shardtensor::detail;
  return launcher_has_store() ? meet(connect(joining), joining) : "";
}
