#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <string>

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "bindings.h"
#include "shardtensor/distributed/backends.h"
#include "shardtensor/distributed/choices.h"
#include "shardtensor/distributed/launch.h"
#include "shardtensor/distributed/leaving.h"

namespace shardtensor::python {

namespace {

using Variables = std::map<std::string, std::string>;

Launch make_launch(
    int64_t rank,
    int64_t world_size,
    int64_t local_rank,
    std::string address,
    int64_t port,
    std::string method) {
  const Launch launch{
      rank,
      world_size,
      local_rank,
      std::move(address),
      port,
      std::move(method)};
  check_launch(launch);
  return launch;
}

Launch detect_launch_in(const Variables& environment) {
  return detect_launch([&](const std::string& name) {
    const auto found = environment.find(name);
    return found == environment.end() ? std::nullopt
                                      : std::optional(found->second);
  });
}

/// For torch.distributed, which makes its process groups itself.
c10::intrusive_ptr<c10d::Backend> make_mpi_backend(
    const std::vector<int64_t>& ranks,
    std::chrono::milliseconds limit) {
  const auto launch = detect_launch();
  const auto mpi = make_mpi({launch, c10::Device(c10::kCPU), limit});
  const auto found = std::find(ranks.begin(), ranks.end(), launch.rank);
  return mpi->make_group("", ranks, found - ranks.begin())
      ->getBackend(c10::kCPU);
}

std::string find_name_in_launchers_store(
    const Launch& launch,
    std::chrono::milliseconds limit) {
  return name_in_launchers_store({launch, c10::Device(c10::kCPU), limit});
}

/// LeavesInTime as a context.
struct Leaving {
  std::unique_ptr<LeavesInTime> in_time;
};

void bind_leaving(py::module_& module) {
  py::class_<Leaving>(module, "LeavesInTime")
      .def(py::init<>())
      .def(
          "__enter__",
          [](Leaving& self) {
            self.in_time = std::make_unique<LeavesInTime>(time_limit());
          })
      .def("__exit__", [](Leaving& self, const py::args&) {
        self.in_time.reset();
      });
}

void bind_launch_error(py::module_& module) {
  static py::handle type =
      py::exception<LaunchError>(module, "LaunchError", PyExc_ValueError)
          .release();
  type.attr("__doc__") =
      "The environment does not say enough, or contradicts itself.";
  // Comes before the translator of c10's errors.
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const LaunchError& launch) {
      py::set_error(type, launch.what_without_backtrace());
    }
  });
}

void bind_launch(py::module_& module) {
  py::class_<Launch>(
      module,
      "Launch",
      "Which process of a job this is. `method` is env, slurm, openmpi or "
      "single.")
      .def(
          py::init(&make_launch),
          py::arg("rank") = 0,
          py::arg("world_size") = 1,
          py::arg("local_rank") = 0,
          py::arg("address") = "localhost",
          py::arg("port") = 0,
          py::arg("method") = "single")
      .def_readonly("rank", &Launch::rank)
      .def_readonly("world_size", &Launch::world_size)
      .def_readonly("local_rank", &Launch::local_rank)
      .def_readonly("address", &Launch::address)
      .def_readonly("port", &Launch::port)
      .def_readonly("method", &Launch::method)
      .def("__eq__", [](const Launch& a, const Launch& b) { return a == b; })
      .def("__repr__", [](const Launch& launch) {
        return c10::str(
            "Launch(rank=",
            launch.rank,
            ", world_size=",
            launch.world_size,
            ", local_rank=",
            launch.local_rank,
            ", address='",
            launch.address,
            "', port=",
            launch.port,
            ", method='",
            launch.method,
            "')");
      });
  const auto* doc =
      "The launch that the environment describes: torchrun's variables first, "
      "then SLURM's, then Open MPI's, else a single process. ENV, SLURM or "
      "OPENMPI in SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD chooses one "
      "instead; it is then a LaunchError if its variables are missing.";
  module.def("detect_launch", py::overload_cast<>(&detect_launch), doc);
  module.def("detect_launch", &detect_launch_in, py::arg("environment"));
  module.def("address_of_rank_0", &address_of_rank_0, py::arg("launch"));
  module.def(
      "name_in_launchers_store",
      &find_name_in_launchers_store,
      py::arg("launch"),
      py::arg("limit"),
      ReleaseGil());
  module.def("first_host", &first_host, py::arg("nodes"));
}

} // namespace

void bind_distributed(py::module_& module) {
  bind_launch_error(module);
  bind_launch(module);
  bind_leaving(module);
  module.def(
      "choose_device",
      &choose_device,
      py::arg("launch"),
      py::arg("gpus"),
      py::arg("backend"));
  module.def(
      "choose_backend",
      &choose_backend,
      py::arg("wanted"),
      py::arg("launch"),
      py::arg("device"),
      py::arg("has_mpi"));
  module.def("has_mpi", &has_mpi);
  module.def(
      "make_mpi_backend",
      &make_mpi_backend,
      py::arg("ranks"),
      py::arg("limit"),
      py::call_guard<py::gil_scoped_release>());
  module.def("time_limit", &time_limit);
  module.def(
      "complete_mesh_shape",
      &complete_mesh_shape,
      py::arg("shape"),
      py::arg("axis_names"),
      py::arg("ranks"));
}

} // namespace shardtensor::python
