#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardtensor/comm/group.h"

namespace shardtensor::detail {

/// The process groups of a job, which c10d knows by name while this lives.
class JobGroups {
 public:
  /// `limit` bounds their end, see LeavesInTime.
  explicit JobGroups(std::chrono::milliseconds limit) : limit_(limit) {}
  JobGroups(const JobGroups&) = delete;
  JobGroups& operator=(const JobGroups&) = delete;
  /// Shuts them down: a group of NCCL that just goes aborts what is under way.
  ~JobGroups();

  void add(
      const std::string& name,
      c10::intrusive_ptr<c10d::ProcessGroup> group);

 private:
  std::chrono::milliseconds limit_;
  // c10d keeps weak references.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  std::vector<std::string> names_;
};

/// Returns when all ranks of the group have come here, also where `device` has
/// a queue.
void wait_for_all(const Group& group, c10::Device device);

} // namespace shardtensor::detail
