#include "shardtensor/distributed/rendezvous.h"

#include <cstdlib>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace shardtensor::detail {

namespace {

/// torchrun opens the store itself and says so.
bool launcher_has_store() {
  const char* value = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return value && std::string(value) == "True";
}

} // namespace

StorePtr open_store(const Joining& joining) {
  const auto& launch = joining.launch;
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.port);
  options.isServer = launch.rank == 0 && !launcher_has_store();
  options.numWorkers = static_cast<size_t>(launch.world_size);
  options.timeout = joining.limit;
  return c10::make_intrusive<c10d::TCPStore>(
      address_of_rank_0(launch), options);
}

StorePtr store_of_group(
    const StorePtr& store,
    const std::string& name,
    const std::vector<int64_t>& ranks) {
  return c10::make_intrusive<c10d::PrefixStore>(
      c10::str("shardtensor/", name, c10::IntArrayRef(ranks)), store);
}

} // namespace shardtensor::detail
