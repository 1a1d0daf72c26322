#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardtensor/distributed/launch.h"

namespace shardtensor {

/// Makes process groups of one kind. Thread safety / ordering: the members of a
/// group make it together; groups are made in the same order on all ranks.
class Backends {
 public:
  virtual ~Backends() = default;
  virtual const char* name() const = 0;

  /// A group of these global ranks, this process the `place`-th of them.
  virtual c10::intrusive_ptr<c10d::ProcessGroup> make_group(
      const std::string& name,
      const std::vector<int64_t>& ranks,
      int64_t place) = 0;
};
using BackendsPtr = std::unique_ptr<Backends>;

/// What all kinds of backends are made from.
struct Joining {
  Launch launch;
  c10::Device device;
  std::chrono::milliseconds limit; // of every call
};

/// gloo on a TCPStore at the launch's address and port; opens the store, so
/// that all ranks of the job come here together. Raises when they do not
/// within the limit.
BackendsPtr make_gloo(const Joining& joining);

/// With a launcher whose store stays when it starts the ranks again: a name
/// that the ranks of this job agree on there, under which those before them
/// have left nothing. Else empty. All ranks call it together.
std::string name_in_launchers_store(const Joining& joining);

/// NCCL for CUDA tensors beside gloo for host tensors. Raises when libtorch
/// has none.
BackendsPtr make_nccl(const Joining& joining);
bool has_nccl();

/// MPI, from libshardtensor_mpi.so beside this library. Raises when there is
/// none or when it does not load.
BackendsPtr make_mpi(const Joining& joining);
bool has_mpi();

} // namespace shardtensor
