#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "shardtensor/layout/mesh.h"

namespace shardtensor {

/// The job of this process: rank, device, process groups and the global mesh,
/// without Python.
///
///   shardtensor::DistributedManager::initialize();
///   auto& manager = shardtensor::DistributedManager::get();
///   const auto mesh = manager.initialize_mesh({-1, 2}, {"data", "domain"});
///   ...
///   shardtensor::DistributedManager::cleanup();
///
/// Thread safety / ordering: initialize, initialize_mesh, barrier and cleanup
/// communicate: all ranks call them in the same order.
class DistributedManager {
 public:
  /// Joins the job that the environment describes (see detect_launch).
  /// `backend` is "mpi", "gloo", "nccl" or "": then
  /// SHARDTENSOR_DISTRIBUTED_BACKEND decides, else NCCL where there are CUDA
  /// devices and libtorch has it, else MPI in a job of mpirun, else gloo. A
  /// single process opens nothing. SHARDTENSOR_DISTRIBUTED_TIMEOUT bounds every
  /// call, in seconds (default: 1800). Raises when called twice, for an unknown
  /// backend, or when the ranks do not meet.
  static void initialize(const std::string& backend = "");
  static bool is_initialized();
  /// Raises before initialize().
  static DistributedManager& get();
  /// Leaves the job; groups and meshes made here cannot be used any more.
  /// `wait` lets the ranks leave together.
  static void cleanup(bool wait = false);

  ~DistributedManager();
  DistributedManager(const DistributedManager&) = delete;
  DistributedManager& operator=(const DistributedManager&) = delete;

  int64_t rank() const;
  int64_t world_size() const;
  /// The rank on this node.
  int64_t local_rank() const;
  /// cuda:local_rank, modulo the number of devices; cpu where there is no CUDA
  /// or no NCCL.
  at::Device device() const;
  /// "mpi", "gloo", "nccl" or "none" (a single process).
  std::string backend() const;
  /// The name of the group of all ranks, for calls that take a group.
  const std::string& group() const;

  /// A mesh of all ranks with a process group per axis; it becomes
  /// global_mesh(). One entry of `shape` may be -1: with 8 ranks, {-1, 2} is
  /// {4, 2}. Raises when the shape does not have the job's number of ranks, or
  /// the names are not one per axis, all different.
  MeshPtr initialize_mesh(
      const std::vector<int64_t>& shape,
      const std::vector<std::string>& axis_names);
  /// Raises before initialize_mesh().
  const MeshPtr& global_mesh() const;
  /// One axis of the global mesh: this rank and those that differ from it along
  /// this axis alone. Raises for another name. No communication.
  ///
  /// Example: {2, 2} as {"data", "domain"}: mesh("domain") is that of ranks 2
  /// and 3 on both, so each pair may work on a sample of its own.
  MeshPtr mesh(const std::string& name) const;

  /// Returns when all ranks have come here.
  void barrier() const;

 private:
  struct State;
  explicit DistributedManager(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

} // namespace shardtensor
