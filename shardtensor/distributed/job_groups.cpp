#include "shardtensor/distributed/job_groups.h"

#include <utility>

#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "shardtensor/distributed/leaving.h"

namespace shardtensor::detail {

JobGroups::~JobGroups() {
  for (const auto& name : names_) {
    c10d::unregister_process_group(name);
  }
  const LeavesInTime in_time(limit_);
  for (const auto& group : groups_) {
    group->shutdown();
  }
}

void JobGroups::add(
    const std::string& name,
    c10::intrusive_ptr<c10d::ProcessGroup> group) {
  c10d::register_process_group(name, group);
  groups_.push_back(std::move(group));
  names_.push_back(name);
}

void wait_for_all(const Group& group, c10::Device device) {
  if (group.ranks() > 1) {
    const auto number = at::zeros({1}, at::TensorOptions(device));
    group.all_reduce(
        number, Reduce::Sum, [] { return "DistributedManager::barrier"; });
    number.item(); // a device's queue is not waited for otherwise
  }
}

} // namespace shardtensor::detail
