#include <cstdlib>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "shardtensor/distributed/backends.h"

namespace shardtensor {

namespace {

/// torchrun opens the store itself and says so.
bool launcher_has_store() {
  const char* value = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return value && std::string(value) == "True";
}

class Gloo : public Backends {
 public:
  explicit Gloo(const Joining& joining) : limit_(joining.limit) {
    const auto& launch = joining.launch;
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(launch.port);
    options.isServer = launch.rank == 0 && !launcher_has_store();
    options.numWorkers = static_cast<size_t>(launch.world_size);
    options.timeout = joining.limit;
    store_ =
        c10::make_intrusive<c10d::TCPStore>(address_of_rank_0(launch), options);
  }

  const char* name() const override {
    return "gloo";
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_group(
      const std::string& name,
      const std::vector<int64_t>& ranks,
      int64_t place) override {
    const auto count = static_cast<int>(ranks.size());
    const auto me = static_cast<int>(place);
    // Groups of one name that share no rank meet under names of their own.
    const auto store = c10::make_intrusive<c10d::PrefixStore>(
        c10::str("shardtensor/", name, c10::IntArrayRef(ranks)), store_);
    const auto gloo = c10d::ProcessGroup::BackendType::GLOO;
    auto group = c10::make_intrusive<c10d::ProcessGroup>(me, count);
    group->setBackend(
        c10::DeviceType::CPU,
        gloo,
        c10::make_intrusive<c10d::ProcessGroupGloo>(
            store,
            me,
            count,
            c10d::ProcessGroupGloo::Options::create_default(limit_)));
    group->setDefaultBackend(gloo);
    return group;
  }

 private:
  std::chrono::milliseconds limit_;
  c10::intrusive_ptr<c10d::Store> store_;
};

} // namespace

BackendsPtr make_gloo(const Joining& joining) {
  return std::make_unique<Gloo>(joining);
}

} // namespace shardtensor
