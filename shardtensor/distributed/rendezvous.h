#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "shardtensor/distributed/backends.h"

namespace shardtensor::detail {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// The TCPStore at the launch's address and port; all ranks of the job come
/// here together. Raises when they do not within the limit.
StorePtr open_store(const Joining& joining);

/// A name that all ranks of this job get, and that no job before them on the
/// same store got, whatever it left there; see Note [Ranks that start again].
std::string agree_on_name(
    c10d::Store& store,
    int64_t rank,
    int64_t ranks,
    std::chrono::milliseconds limit);

/// Where the members of one group meet. Groups of one name that share no rank
/// meet under names of their own.
StorePtr store_of_group(
    const StorePtr& store,
    const std::string& name,
    const std::vector<int64_t>& ranks);

/// gloo on a store that is open already.
BackendsPtr make_gloo(const Joining& joining, const StorePtr& store);

} // namespace shardtensor::detail
