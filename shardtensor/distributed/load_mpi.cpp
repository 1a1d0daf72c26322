#include <dlfcn.h>

#include <filesystem>

#include <c10/util/Exception.h>

#include "shardtensor/distributed/backends.h"

// MPI is a library of its own, loaded when it is wanted: programs without MPI
// must start on machines without MPI.

namespace shardtensor {

namespace {

using MakeMpi = Backends* (*)(const Joining&);

std::filesystem::path mpi_library() {
  Dl_info here;
  TORCH_CHECK(
      dladdr(reinterpret_cast<const void*>(&make_mpi), &here),
      "shardtensor: libshardtensor.so does not know where it is");
  return std::filesystem::path(here.dli_fname).parent_path() /
      "libshardtensor_mpi.so";
}

} // namespace

bool has_mpi() {
  return std::filesystem::exists(mpi_library());
}

BackendsPtr make_mpi(const Joining& joining) {
  const auto path = mpi_library();
  TORCH_CHECK(
      has_mpi(),
      "shardtensor: there is no ",
      path.string(),
      ": the library was built where CMake found no MPI");
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  TORCH_CHECK(library, "shardtensor: MPI does not load: ", dlerror());
  void* make = dlsym(library, "shardtensor_make_mpi");
  TORCH_CHECK(make, "shardtensor: ", path.string(), " is of another version");
  return BackendsPtr(reinterpret_cast<MakeMpi>(make)(joining));
}

} // namespace shardtensor
