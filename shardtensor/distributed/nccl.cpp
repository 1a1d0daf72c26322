#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "shardtensor/distributed/backends.h"
#include "shardtensor/distributed/rendezvous.h"

// Built where libtorch has NCCL; see without_nccl.cpp.

namespace shardtensor {

using namespace detail;

namespace {

class Nccl : public Backends {
 public:
  explicit Nccl(const Joining& joining)
      : device_(joining.device),
        limit_(joining.limit),
        store_(open_store(joining)),
        gloo_(make_gloo(joining, store_)) {
    c10::impl::VirtualGuardImpl(device_.type()).setDevice(device_);
  }

  const char* name() const override {
    return "nccl";
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_group(
      const std::string& name,
      const std::vector<int64_t>& ranks,
      int64_t place) override {
    const auto nccl = c10d::ProcessGroup::BackendType::NCCL;
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = limit_;
    options->is_high_priority_stream = true; // a convolution starts beside it
    auto group = gloo_->make_group(name, ranks, place);
    group->setBoundDeviceId(device_); // backends take it over when they are set
    group->setBackend(
        c10::DeviceType::CUDA,
        nccl,
        c10::make_intrusive<c10d::ProcessGroupNCCL>(
            store_of_group(store_, "nccl/" + name, ranks),
            static_cast<int>(place),
            static_cast<int>(ranks.size()),
            options));
    group->setDefaultBackend(nccl);
    return group;
  }

 private:
  c10::Device device_;
  std::chrono::milliseconds limit_;
  StorePtr store_;
  BackendsPtr gloo_;
};

} // namespace

bool has_nccl() {
  return true;
}

BackendsPtr make_nccl(const Joining& joining) {
  TORCH_CHECK_VALUE(
      joining.device.is_cuda(),
      "DistributedManager: backend 'nccl' needs a CUDA device, this process has ",
      joining.device);
  return std::make_unique<Nccl>(joining);
}

} // namespace shardtensor
