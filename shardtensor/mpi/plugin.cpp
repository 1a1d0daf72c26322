#include <c10/util/Exception.h>

#include "shardtensor/distributed/backends.h"
#include "shardtensor/mpi/backend.h"
#include "shardtensor/mpi/session.h"

namespace shardtensor::detail {

namespace {

class Mpi : public Backends {
 public:
  explicit Mpi(const Joining& joining) : limit_(joining.limit) {
    const auto& session = MpiSession::get();
    const auto& launch = joining.launch;
    TORCH_CHECK(
        session.rank() == launch.rank && session.ranks() == launch.world_size,
        "shardtensor: MPI says rank ",
        session.rank(),
        " of ",
        session.ranks(),
        ", the environment (",
        launch.method,
        ") rank ",
        launch.rank,
        " of ",
        launch.world_size,
        "; was the program started by another MPI's mpirun? "
        "SHARDTENSOR_DISTRIBUTED_BACKEND=gloo does without MPI");
  }

  const char* name() const override {
    return "mpi";
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_group(
      const std::string&,
      const std::vector<int64_t>& ranks,
      int64_t place) override {
    const auto mpi = c10d::ProcessGroup::BackendType::MPI;
    auto group = c10::make_intrusive<c10d::ProcessGroup>(
        static_cast<int>(place), static_cast<int>(ranks.size()));
    const auto backend = c10::make_intrusive<MpiBackend>(
        std::vector<int>(ranks.begin(), ranks.end()), limit_);
    for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
      group->setBackend(device, mpi, backend);
    }
    group->setDefaultBackend(mpi);
    return group;
  }

 private:
  std::chrono::milliseconds limit_;
};

} // namespace

} // namespace shardtensor::detail

/// What load_mpi.cpp looks for.
extern "C" __attribute__((visibility("default"))) shardtensor::Backends*
shardtensor_make_mpi(const shardtensor::Joining& joining) {
  return new shardtensor::detail::Mpi(joining);
}
