#include "shardtensor/distributed/leaving.h"

#include <cstdlib>
#include <iostream>

namespace shardtensor {

namespace {

void end_without_others(std::chrono::milliseconds limit) {
  std::cerr
      << "DistributedManager: the other ranks have not left the job within "
      << limit.count()
      << " ms of this one (SHARDTENSOR_DISTRIBUTED_TIMEOUT); this process "
         "ends without them"
      << std::endl;
  std::_Exit(1);
}

} // namespace

LeavesInTime::LeavesInTime(std::chrono::milliseconds limit)
    : watch_([limit, left = left_.get_future()] {
        if (left.wait_for(limit) != std::future_status::ready) {
          end_without_others(limit);
        }
      }) {}

LeavesInTime::~LeavesInTime() {
  left_.set_value();
  watch_.join();
}

} // namespace shardtensor
