#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "shardtensor/distributed/launch.h"

// What DistributedManager decides, in C++ and in Python alike. Nothing here
// communicates.

namespace shardtensor {

/// The CUDA devices of this process; none where libtorch has no CUDA.
int64_t count_gpus();

/// cuda:local_rank where there are `gpus` that NCCL could move data between;
/// cpu where `backend` (else SHARDTENSOR_DISTRIBUTED_BACKEND) is another one.
/// One GPU is that of every rank: launchers show each process its own. Raises
/// for more ranks than several GPUs.
c10::Device choose_device(
    const Launch& launch,
    int64_t gpus,
    const std::string& backend);

/// `wanted`, else SHARDTENSOR_DISTRIBUTED_BACKEND, else "nccl" for CUDA
/// devices, "mpi" in a job of mpirun that has it, "gloo". Raises for others.
std::string choose_backend(
    const std::string& wanted,
    const Launch& launch,
    c10::Device device,
    bool has_mpi);

/// Of every call, in seconds in SHARDTENSOR_DISTRIBUTED_TIMEOUT; half an hour
/// if it is not set. Raises when it is no positive number.
std::chrono::milliseconds time_limit();

/// The shape of a mesh of all ranks with its -1 replaced: {-1, 2} over 8 ranks
/// is {4, 2}. Raises when it does not have the job's number of ranks, or the
/// names are not one per axis, all different.
std::vector<int64_t> complete_mesh_shape(
    const std::vector<int64_t>& shape,
    const std::vector<std::string>& axis_names,
    int64_t ranks);

} // namespace shardtensor
