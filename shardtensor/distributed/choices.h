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

/// cuda:local_rank, modulo the number of devices; cpu where there is no CUDA or
/// no NCCL, for nothing could move between the ranks' CUDA tensors.
c10::Device choose_device(const Launch& launch, bool has_nccl);

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
