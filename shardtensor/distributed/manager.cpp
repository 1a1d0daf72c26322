#include "shardtensor/distributed/manager.h"

#include <algorithm>
#include <numeric>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "shardtensor/distributed/backends.h"
#include "shardtensor/distributed/choices.h"
#include "shardtensor/distributed/job_groups.h"
#include "shardtensor/distributed/launch.h"
#include "shardtensor/layout/mesh_axes.h"

namespace shardtensor {

using namespace detail;

namespace {

std::unique_ptr<DistributedManager>& instance() {
  static std::unique_ptr<DistributedManager> manager;
  return manager;
}

BackendsPtr make_backends(const std::string& wanted, const Joining& joining) {
  const auto name =
      choose_backend(wanted, joining.launch, joining.device, has_mpi());
  return name == "mpi" ? make_mpi(joining)
      : name == "nccl" ? make_nccl(joining)
                       : make_gloo(joining);
}

} // namespace

// ---- joining and leaving ----------------------------------------------------

struct DistributedManager::State {
  Launch launch;
  c10::Device device{c10::kCPU};
  BackendsPtr backends; // none for a single process
  std::string group;
  MeshPtr mesh;
  int64_t meshes = 0;
  JobGroups groups{time_limit()};

  /// Makes a group and registers it under its name.
  std::string add_group(
      const std::string& name,
      const std::vector<int64_t>& ranks) {
    const auto found = std::find(ranks.begin(), ranks.end(), launch.rank);
    const int64_t place = found - ranks.begin();
    // Nothing is ever sent in a group of one.
    groups.add(
        name,
        ranks.size() == 1 || !backends
            ? c10::make_intrusive<c10d::ProcessGroup>(0, 1)
            : backends->make_group(name, ranks, place));
    return name;
  }
};

void DistributedManager::initialize(const std::string& backend) {
  TORCH_CHECK(
      !is_initialized(), "DistributedManager::initialize: called before");
  auto state = std::make_unique<State>();
  state->launch = detect_launch();
  state->device =
      choose_device(state->launch, has_nccl() ? count_gpus() : 0, backend);
  if (state->device.is_cuda()) {
    c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(state->device);
  }
  if (state->launch.method != "single") {
    const Joining joining{state->launch, state->device, time_limit()};
    state->backends = make_backends(backend, joining);
  }
  std::vector<int64_t> all(state->launch.world_size);
  std::iota(all.begin(), all.end(), 0);
  state->group = state->add_group("world", all);
  instance().reset(new DistributedManager(std::move(state)));
}

bool DistributedManager::is_initialized() {
  return instance() != nullptr;
}

DistributedManager& DistributedManager::get() {
  TORCH_CHECK(
      is_initialized(),
      "DistributedManager::get: call DistributedManager::initialize() first, "
      "once per process");
  return *instance();
}

void DistributedManager::cleanup(bool wait) {
  if (wait && is_initialized()) {
    get().barrier();
  }
  instance().reset();
}

DistributedManager::DistributedManager(std::unique_ptr<State> state)
    : state_(std::move(state)) {}

DistributedManager::~DistributedManager() = default;

// ---- this process -----------------------------------------------------------

int64_t DistributedManager::rank() const {
  return state_->launch.rank;
}

int64_t DistributedManager::world_size() const {
  return state_->launch.world_size;
}

int64_t DistributedManager::local_rank() const {
  return state_->launch.local_rank;
}

at::Device DistributedManager::device() const {
  return state_->device;
}

std::string DistributedManager::backend() const {
  return state_->backends ? state_->backends->name() : "none";
}

const std::string& DistributedManager::group() const {
  return state_->group;
}

void DistributedManager::barrier() const {
  wait_for_all(Group(state_->group), state_->device);
}

// ---- meshes -----------------------------------------------------------------

MeshPtr DistributedManager::initialize_mesh(
    const std::vector<int64_t>& shape,
    const std::vector<std::string>& axis_names) {
  Mesh::Options options;
  options.shape = complete_mesh_shape(shape, axis_names, world_size());
  options.ranks.resize(world_size());
  std::iota(options.ranks.begin(), options.ranks.end(), 0);
  options.axis_names = axis_names;
  options.position = rank();
  options.group = group();
  const Mesh grid = *make_mesh(options); // raises before anybody communicates
  const auto prefix = "mesh" + std::to_string(state_->meshes++) + ".";
  for (int64_t axis = 0; axis < grid.axes(); ++axis) {
    std::vector<int64_t> line;
    for (int64_t i = 0; i < grid.ranks(axis); ++i) {
      line.push_back(grid.with_coordinate(rank(), axis, i));
    }
    options.axis_groups.push_back(
        grid.axes() == 1 ? group()
                         : state_->add_group(prefix + axis_names[axis], line));
  }
  state_->mesh = make_mesh(options);
  return state_->mesh;
}

const MeshPtr& DistributedManager::global_mesh() const {
  TORCH_CHECK(
      state_->mesh,
      "DistributedManager::global_mesh: call initialize_mesh() first");
  return state_->mesh;
}

MeshPtr DistributedManager::mesh(const std::string& name) const {
  return axis_mesh(*global_mesh(), name);
}

} // namespace shardtensor
