#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <c10/util/Exception.h>

namespace shardtensor {

/// Which process of a job this is, as its launcher says in the environment.
struct Launch {
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t local_rank = 0; // on this node
  std::string address = "localhost"; // of rank 0
  int64_t port = 0;
  std::string method = "single"; // env, slurm, openmpi or single

  bool operator==(const Launch& other) const = default;
};

/// The environment does not say enough, or contradicts itself.
class LaunchError : public c10::ValueError {
  using c10::ValueError::ValueError;
};

/// The value of an environment variable, if it is set.
using Environment =
    std::function<std::optional<std::string>(const std::string& name)>;

/// The launch that the environment describes: torchrun's variables first, then
/// SLURM's, then Open MPI's, else a single process. ENV, SLURM or OPENMPI in
/// SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD (or PhysicsNeMo's name of it)
/// chooses one. Raises LaunchError when its variables are missing or are no
/// numbers, or when the rank is outside the job. No communication.
Launch detect_launch(const Environment& environment);
/// From this process' environment.
Launch detect_launch();

/// Raises LaunchError when the rank is outside the job, or the port is none.
void check_launch(const Launch& launch);

/// Where the ranks meet, if not by MPI. Raises LaunchError when the launcher
/// does not say it: mpirun on several nodes.
std::string address_of_rank_0(const Launch& launch);

/// The first name of a SLURM node list: "gpu03" of "gpu[03-05,9],cpu1".
std::string first_host(const std::string& nodes);

} // namespace shardtensor
