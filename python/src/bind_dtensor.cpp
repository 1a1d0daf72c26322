#include <memory>
#include <string>
#include <utility>

#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"
#include "shardtensor/layout/mesh_axes.h"
#include "shardtensor/tensor/dtensor.h"

namespace shardtensor::python {
namespace {

at::Tensor tensor_of(const py::object& object) {
  return THPVariable_Unpack(object.ptr());
}

py::object object_of(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

/// Held by autograd nodes, which may go without the GIL.
using Held = std::shared_ptr<PyObject>;

Held hold(py::object object) {
  return {object.release().ptr(), [](PyObject* held) {
            if (Py_IsInitialized()) {
              const py::gil_scoped_acquire gil;
              Py_DECREF(held);
            }
          }};
}

/// `make(local)` gives a DTensor.
class PythonLayout final : public DTensorLayout {
 public:
  PythonLayout(SpecPtr spec, py::object make)
      : spec_(std::move(spec)), make_(hold(std::move(make))) {}

  const SpecPtr& spec() const override {
    return spec_;
  }
  at::Tensor make(const at::Tensor& local) const override {
    const py::gil_scoped_acquire gil;
    return tensor_of(py::handle(make_.get())(object_of(local)));
  }

 private:
  SpecPtr spec_;
  Held make_;
};

/// Functions of shardtensor.dtensor, kept until the process ends.
class PythonBridge final : public DTensorBridge {
 public:
  PythonBridge(
      py::object dtensor_class,
      py::object plain_layout,
      py::object open,
      py::object joint_mesh)
      : dtensor_class_(dtensor_class.release()),
        plain_layout_(plain_layout.release()),
        open_(open.release()),
        joint_mesh_(joint_mesh.release()) {}

  bool is_dtensor(const at::Tensor& tensor) const override {
    const py::gil_scoped_acquire gil;
    PyObject* known = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    return known &&
        PyType_IsSubtype(
               Py_TYPE(known),
               reinterpret_cast<PyTypeObject*>(dtensor_class_.ptr()));
  }
  at::Tensor plain_layout(const at::Tensor& dtensor) const override {
    const py::gil_scoped_acquire gil;
    return tensor_of(plain_layout_(object_of(dtensor)));
  }
  std::pair<at::Tensor, DTensorLayoutPtr> open(
      const at::Tensor& dtensor) const override {
    const py::gil_scoped_acquire gil;
    const auto parts = open_(object_of(dtensor)).cast<py::tuple>();
    return {
        tensor_of(parts[0]), parts[1].cast<std::shared_ptr<PythonLayout>>()};
  }
  MeshPtr joint_mesh(const MeshPtr& one, const MeshPtr& other) const override {
    const py::gil_scoped_acquire gil;
    const auto found = joint_mesh_(handle(one), handle(other));
    return found.is_none() ? nullptr : found.cast<MeshHandle>();
  }

 private:
  py::handle dtensor_class_;
  py::handle plain_layout_;
  py::handle open_;
  py::handle joint_mesh_;
};

} // namespace

void bind_dtensor(py::module_& module) {
  py::class_<PythonLayout, std::shared_ptr<PythonLayout>>(
      module, "DTensorLayout")
      .def(
          py::init([](const SpecHandle& spec, py::object make) {
            return std::make_shared<PythonLayout>(spec, std::move(make));
          }),
          py::arg("spec"),
          py::arg("make"))
      .def_property_readonly("spec", [](const PythonLayout& layout) {
        return handle(layout.spec());
      });
  module.def(
      "set_dtensor_bridge",
      [](py::object dtensor_class,
         py::object plain_layout,
         py::object open,
         py::object joint_mesh) {
        set_dtensor_bridge(
            std::make_unique<PythonBridge>(
                std::move(dtensor_class),
                std::move(plain_layout),
                std::move(open),
                std::move(joint_mesh)));
      },
      py::arg("dtensor_class"),
      py::arg("plain_layout"),
      py::arg("open"),
      py::arg("joint_mesh"));
  module.def(
      "has_axes",
      [](const MeshHandle& whole, const MeshHandle& part) {
        return axes_in(*part, *whole).has_value();
      },
      py::arg("whole").none(false),
      py::arg("part").none(false));
  module.def(
      "from_dtensor",
      [](const at::Tensor& dtensor) {
        return from_dtensor(dtensor, dtensor_spec(dtensor)->mesh());
      },
      ReleaseGil(),
      py::arg("dtensor"));
}

} // namespace shardtensor::python
