#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "shardtensor/layout/infer.h"

namespace shardtensor::python {
namespace {

const char* kind_of(const Placement& placement) {
  switch (placement.kind) {
    case Placement::Kind::Shard:
      return "shard";
    case Placement::Kind::Replicate:
      return "replicate";
    case Placement::Kind::Partial:
      return "partial";
  }
  return "unknown";
}

std::pair<int64_t, int64_t> as_pair(const Interval& interval) {
  return {interval.begin, interval.end};
}

void bind_placement(py::module_& module) {
  py::class_<Placement>(module, "Placement")
      .def_static("shard", &Placement::shard, py::arg("dim"))
      .def_static("replicate", &Placement::replicate)
      .def_static(
          "partial",
          [](const std::string& reduce) {
            return Placement::partial(parse_reduce(reduce));
          },
          py::arg("reduce") = "sum")
      .def_property_readonly("kind", &kind_of)
      .def_readonly("dim", &Placement::dim)
      .def_property_readonly(
          "reduce",
          [](const Placement& placement) {
            return to_string(placement.reduce);
          })
      .def(
          "__eq__",
          [](const Placement& a, const Placement& b) { return a == b; })
      .def(
          "__hash__",
          [](const Placement& placement) {
            return py::hash(
                py::make_tuple(
                    kind_of(placement),
                    placement.dim,
                    to_string(placement.reduce)));
          })
      .def("__repr__", [](const Placement& placement) {
        return to_string(placement);
      });
}

void bind_partition(py::module_& module) {
  py::class_<Partition>(module, "Partition")
      .def(
          py::init<const std::vector<int64_t>&, int64_t>(),
          py::arg("sizes"),
          py::arg("repeat") = 1)
      .def_static(
          "chunked",
          py::overload_cast<int64_t, const std::vector<int64_t>&>(
              &Partition::chunked),
          py::arg("extent"),
          py::arg("axes"))
      .def_property_readonly("pieces", &Partition::pieces)
      .def_property_readonly("repeat", &Partition::repeat)
      .def_property_readonly("period", &Partition::period)
      .def_property_readonly("extent", &Partition::extent)
      .def_property_readonly("sizes", &Partition::sizes)
      .def_property_readonly("offsets", &Partition::offsets)
      .def("is_contiguous", &Partition::is_contiguous)
      .def(
          "interval",
          [](const Partition& partition, int64_t piece) {
            return as_pair(partition.interval(piece));
          },
          py::arg("piece"))
      .def(
          "__eq__",
          [](const Partition& a, const Partition& b) { return a == b; })
      .def("__repr__", [](const Partition& partition) {
        return c10::str(partition);
      });
}

void bind_mesh(py::module_& module) {
  py::class_<Mesh, MeshHandle>(module, "Mesh")
      .def_property_readonly("shape", &Mesh::shape)
      .def_property_readonly(
          "ranks", [](const Mesh& mesh) { return mesh.options().ranks; })
      .def_property_readonly(
          "axis_names",
          [](const Mesh& mesh) { return mesh.options().axis_names; })
      .def_property_readonly(
          "axis_groups",
          [](const Mesh& mesh) { return mesh.options().axis_groups; })
      .def_property_readonly("position", &Mesh::position)
      .def_property_readonly(
          "group", py::overload_cast<>(&Mesh::group, py::const_))
      .def(
          "coordinate",
          py::overload_cast<int64_t, int64_t>(&Mesh::coordinate, py::const_),
          py::arg("position"),
          py::arg("axis"))
      .def(
          "with_coordinate",
          &Mesh::with_coordinate,
          py::arg("position"),
          py::arg("axis"),
          py::arg("to"))
      // Interned: the address is the identity.
      .def("__eq__", [](const Mesh& a, const Mesh& b) { return &a == &b; })
      .def(
          "__hash__",
          [](const Mesh& mesh) { return std::hash<const Mesh*>()(&mesh); })
      .def("__repr__", [](const Mesh& mesh) { return c10::str(mesh); });
  module.def(
      "make_mesh",
      [](std::vector<int64_t> shape,
         std::vector<int64_t> ranks,
         std::vector<std::string> axis_names,
         std::vector<std::string> axis_groups,
         std::string group,
         int64_t position) {
        return handle(make_mesh(
            {std::move(shape),
             std::move(ranks),
             std::move(axis_names),
             std::move(axis_groups),
             std::move(group),
             position}));
      },
      py::arg("shape"),
      py::arg("ranks"),
      py::arg("axis_names"),
      py::arg("axis_groups"),
      py::arg("group"),
      py::arg("position"));
}

void bind_spec(py::module_& module) {
  using IsSharded = bool (ShardSpec::*)() const;
  using IsShardedDim = bool (ShardSpec::*)(int64_t) const;
  using LocalSizes = std::vector<int64_t> (ShardSpec::*)(int64_t) const;
  py::class_<ShardSpec, SpecHandle>(module, "ShardSpec")
      .def_property_readonly(
          "mesh", [](const ShardSpec& spec) { return handle(spec.mesh()); })
      .def_property_readonly("sizes", &ShardSpec::sizes)
      .def_property_readonly("placements", &ShardSpec::placements)
      .def_property_readonly("partitions", &ShardSpec::partitions)
      .def("partition", &ShardSpec::partition, py::arg("dim"))
      .def("is_sharded", static_cast<IsSharded>(&ShardSpec::is_sharded))
      .def(
          "is_sharded",
          static_cast<IsShardedDim>(&ShardSpec::is_sharded),
          py::arg("dim"))
      .def("is_replicated", &ShardSpec::is_replicated)
      .def("has_partial", &ShardSpec::has_partial)
      .def("is_contiguous", &ShardSpec::is_contiguous)
      .def_property_readonly("sharded_dims", &ShardSpec::sharded_dims)
      .def("axes", &ShardSpec::axes, py::arg("dim"))
      .def("piece", &ShardSpec::piece, py::arg("dim"), py::arg("position"))
      .def(
          "interval",
          [](const ShardSpec& spec, int64_t dim, int64_t position) {
            return as_pair(spec.interval(dim, position));
          },
          py::arg("dim"),
          py::arg("position"))
      .def(
          "local_sizes",
          static_cast<LocalSizes>(&ShardSpec::local_sizes),
          py::arg("position"))
      .def(
          "without_partial",
          [](const SpecHandle& spec) { return handle(without_partial(spec)); })
      .def(
          "replicated",
          [](const SpecHandle& spec) { return handle(replicated(spec)); })
      // Interned: the address is the identity.
      .def(
          "__eq__",
          [](const ShardSpec& a, const ShardSpec& b) { return &a == &b; })
      .def(
          "__hash__",
          [](const ShardSpec& spec) {
            return std::hash<const ShardSpec*>()(&spec);
          })
      .def("__repr__", [](const ShardSpec& spec) { return to_string(spec); });
  module.def(
      "make_spec",
      [](const MeshHandle& mesh,
         std::vector<int64_t> sizes,
         std::vector<Placement> placements,
         ShardSpec::Partitions partitions) {
        return handle(make_spec(
            mesh,
            std::move(sizes),
            std::move(placements),
            std::move(partitions)));
      },
      py::arg("mesh"),
      py::arg("sizes"),
      py::arg("placements"),
      py::arg("partitions") = ShardSpec::Partitions());
  module.def(
      "with_placements",
      [](const SpecHandle& spec,
         std::vector<Placement> placements,
         ShardSpec::Partitions partitions) {
        return handle(with_placements(
            spec, std::move(placements), std::move(partitions)));
      },
      py::arg("spec").none(false),
      py::arg("placements"),
      py::arg("partitions") = ShardSpec::Partitions());
  module.def(
      "infer_spec_along_axes",
      [](const MeshHandle& mesh,
         const std::vector<Placement>& placements,
         const std::vector<int64_t>& local_sizes,
         const std::vector<std::vector<std::vector<int64_t>>>& along) {
        return handle(
            infer_spec_along_axes(mesh, placements, local_sizes, along));
      },
      py::arg("mesh").none(false),
      py::arg("placements"),
      py::arg("local_sizes"),
      py::arg("along"));
  module.def(
      "infer_even_spec",
      [](const MeshHandle& mesh,
         const std::vector<Placement>& placements,
         std::vector<int64_t> local_sizes) {
        return handle(
            infer_even_spec(mesh, placements, std::move(local_sizes)));
      },
      py::arg("mesh").none(false),
      py::arg("placements"),
      py::arg("local_sizes"));
}

} // namespace

void bind_layout(py::module_& module) {
  bind_placement(module);
  bind_partition(module);
  bind_mesh(module);
  bind_spec(module);
}

} // namespace shardtensor::python
