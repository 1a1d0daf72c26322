#include <functional>

#include "bindings.h"
#include "shardtensor/graph/shard_graph.h"

namespace shardtensor::python {

namespace {

/// `meanwhile` is Python's: it gets the lock back.
at::Tensor halo_during(
    const ShardGraph& graph,
    const at::Tensor& x,
    const std::function<void(const at::Tensor&)>& meanwhile) {
  return graph.halo(x, [&](const at::Tensor& own) {
    const py::gil_scoped_acquire gil;
    meanwhile(own);
  });
}

} // namespace

void bind_graph(py::module_& module) {
  py::class_<ShardGraph>(module, "ShardGraph")
      .def(
          py::init<const at::Tensor&, const at::Tensor&, const at::Tensor&>(),
          ReleaseGil(),
          py::arg("edge_index"),
          py::arg("targets"),
          py::arg("sources"))
      .def_property_readonly("edge_index", &ShardGraph::edge_index)
      .def_property_readonly("edge_permutation", &ShardGraph::edge_permutation)
      .def_property_readonly("local_edge_index", &ShardGraph::local_edge_index)
      .def_property_readonly("interior_edges", &ShardGraph::interior_edges)
      .def_property_readonly("halo_nodes", &ShardGraph::halo_nodes)
      .def("node_tensor", &ShardGraph::node_tensor, py::arg("local"))
      .def("edge_tensor", &ShardGraph::edge_tensor, py::arg("local"))
      .def(
          "halo",
          [](const ShardGraph& graph, const at::Tensor& x) {
            return graph.halo(x);
          },
          ReleaseGil(),
          py::arg("x"))
      .def(
          "halo_during",
          &halo_during,
          ReleaseGil(),
          py::arg("x"),
          py::arg("meanwhile"));
}

} // namespace shardtensor::python
