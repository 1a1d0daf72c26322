#pragma once

#include <memory>

#include <torch/csrc/utils/pybind.h>

#include "shardtensor/layout/mesh.h"
#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::python {

// One function per topic; each adds its names to the module _C.
void bind_layout(py::module_& module);
void bind_distributed(py::module_& module);
void bind_tensor(py::module_& module);
void bind_dtensor(py::module_& module);
void bind_modes(py::module_& module);
void bind_dispatch(py::module_& module);
void bind_comm(py::module_& module);
void bind_halo(py::module_& module);
void bind_graph(py::module_& module);
void bind_checkpoint(py::module_& module);

// pybind11 holds no pointers to const; the bound classes have no setters.
using MeshHandle = std::shared_ptr<Mesh>;
using SpecHandle = std::shared_ptr<ShardSpec>;

inline MeshHandle handle(const MeshPtr& mesh) {
  return std::const_pointer_cast<Mesh>(mesh);
}
inline SpecHandle handle(const SpecPtr& spec) {
  return std::const_pointer_cast<ShardSpec>(spec);
}

/// For functions that communicate or compute: other Python threads go on.
using ReleaseGil = py::call_guard<py::gil_scoped_release>;

} // namespace shardtensor::python
