#include "shardtensor/distributed/choices.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <set>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/Exception.h>

#include "shardtensor/layout/print.h"

namespace shardtensor {

using namespace detail;

namespace {

// Of the time limit, in seconds: c10d counts milliseconds, and nanoseconds in
// 64 bits.
constexpr double kDefaultLimit = 1800;
constexpr double kLeastLimit = 1e-3;
constexpr double kLargestLimit = 1e9;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

void check_names(
    const std::vector<int64_t>& shape,
    const std::vector<std::string>& names) {
  TORCH_CHECK_VALUE(
      !shape.empty(), "initialize_mesh: the mesh needs at least one axis");
  TORCH_CHECK_VALUE(
      shape.size() == names.size(),
      "initialize_mesh: ",
      shape.size(),
      " axes (",
      join(shape),
      ") but ",
      names.size(),
      " names (",
      join(names),
      ")");
  TORCH_CHECK_VALUE(
      std::set(names.begin(), names.end()).size() == names.size(),
      "initialize_mesh: names (",
      join(names),
      ") are not unique");
}

std::string wanted_backend(const std::string& wanted) {
  return wanted.empty() ? variable("SHARDTENSOR_DISTRIBUTED_BACKEND") : wanted;
}

/// Whether the one GPU that a rank sees may be another than its neighbours see:
/// SLURM hides the others', and so may who set what CUDA reads.
bool may_have_its_own(const Launch& launch, int64_t gpus) {
  return gpus == 1 &&
      (launch.method == "slurm" || !variable("CUDA_VISIBLE_DEVICES").empty());
}

/// The product of the extents, those of -1 left out.
int64_t known_ranks(const std::vector<int64_t>& shape) {
  return std::accumulate(
      shape.begin(), shape.end(), int64_t{1}, [](auto ranks, auto extent) {
        return extent == -1 ? ranks : ranks * extent;
      });
}

} // namespace

int64_t count_gpus() {
  return at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
}

c10::Device choose_device(
    const Launch& launch,
    int64_t gpus,
    const std::string& backend) {
  const auto wanted = wanted_backend(backend);
  if (gpus == 0 || !(wanted.empty() || wanted == "nccl")) {
    return c10::Device(c10::kCPU);
  }
  TORCH_CHECK_VALUE(
      launch.local_rank < gpus || may_have_its_own(launch, gpus),
      "DistributedManager: local rank ",
      launch.local_rank,
      " on a machine with ",
      gpus,
      gpus == 1 ? " GPU" : " GPUs",
      ", expected a rank for each GPU at most, or "
      "SHARDTENSOR_DISTRIBUTED_BACKEND=gloo, for ranks on the CPU");
  const auto index = static_cast<c10::DeviceIndex>(launch.local_rank % gpus);
  return c10::Device(c10::kCUDA, index);
}

std::string choose_backend(
    const std::string& wanted,
    const Launch& launch,
    c10::Device device,
    bool has_mpi) {
  const auto name = wanted_backend(wanted);
  if (name.empty()) {
    const bool mpi = launch.method == "openmpi" && has_mpi;
    return device.is_cuda() ? "nccl" : mpi ? "mpi" : "gloo";
  }
  TORCH_CHECK_VALUE(
      name == "mpi" || name == "gloo" || name == "nccl",
      "DistributedManager: backend '",
      name,
      "', expected mpi, gloo or nccl");
  return name;
}

std::chrono::milliseconds time_limit() {
  const auto text = variable("SHARDTENSOR_DISTRIBUTED_TIMEOUT");
  double seconds = kDefaultLimit;
  if (!text.empty()) {
    char* end = nullptr;
    seconds = std::strtod(text.c_str(), &end);
    TORCH_CHECK_VALUE(
        *end == '\0' && seconds >= kLeastLimit && seconds <= kLargestLimit,
        "SHARDTENSOR_DISTRIBUTED_TIMEOUT='",
        text,
        "': expected a number of seconds, 0.001 to 1e9");
  }
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

std::vector<int64_t> complete_mesh_shape(
    const std::vector<int64_t>& shape,
    const std::vector<std::string>& axis_names,
    int64_t ranks) {
  check_names(shape, axis_names);
  auto complete = shape;
  const auto known = known_ranks(shape);
  const auto open = std::find(complete.begin(), complete.end(), -1);
  if (open != complete.end() && known > 0) {
    *open = ranks / known;
  }
  const bool positive = std::all_of(
      complete.begin(), complete.end(), [](auto extent) { return extent > 0; });
  TORCH_CHECK_VALUE(
      positive && known_ranks(complete) == ranks,
      "initialize_mesh: a mesh of shape (",
      join(shape),
      ") does not have the ",
      ranks,
      " ranks of the job");
  return complete;
}

} // namespace shardtensor
