#include <c10/util/Exception.h>

#include "shardtensor/distributed/backends.h"

// Built where libtorch has no NCCL or its headers are missing; see nccl.cpp.

namespace shardtensor {

bool has_nccl() {
  return false;
}

BackendsPtr make_nccl(const Joining&) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "shardtensor: built without NCCL; expected gloo or mpi");
}

} // namespace shardtensor
