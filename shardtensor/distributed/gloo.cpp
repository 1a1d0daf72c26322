#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <c10/util/Exception.h>

#include "shardtensor/distributed/backends.h"
#include "shardtensor/distributed/rendezvous.h"

namespace shardtensor {

using namespace detail;

namespace {

class Gloo : public Backends {
 public:
  Gloo(std::chrono::milliseconds limit, StorePtr store)
      : limit_(limit), store_(std::move(store)) {}

  const char* name() const override {
    return "gloo";
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_group(
      const std::string& name,
      const std::vector<int64_t>& ranks,
      int64_t place) override {
    const auto count = static_cast<int>(ranks.size());
    const auto me = static_cast<int>(place);
    const auto gloo = c10d::ProcessGroup::BackendType::GLOO;
    auto group = c10::make_intrusive<c10d::ProcessGroup>(me, count);
    group->setBackend(
        c10::DeviceType::CPU,
        gloo,
        c10::make_intrusive<c10d::ProcessGroupGloo>(
            store_of_group(store_, name, ranks),
            me,
            count,
            c10d::ProcessGroupGloo::Options::create_default(limit_)));
    group->setDefaultBackend(gloo);
    return group;
  }

 private:
  std::chrono::milliseconds limit_;
  StorePtr store_;
};

} // namespace

BackendsPtr detail::make_gloo(const Joining& joining, const StorePtr& store) {
  return std::make_unique<Gloo>(joining.limit, store);
}

BackendsPtr make_gloo(const Joining& joining) {
  return detail::make_gloo(joining, open_store(joining));
}

} // namespace shardtensor
