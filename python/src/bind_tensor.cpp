#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings.h"
#include "shardtensor/tensor/constant.h"
#include "shardtensor/tensor/infer_spec.h"
#include "shardtensor/tensor/random.h"
#include "shardtensor/tensor/scatter.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor::python {
namespace {

PyTypeObject* tensor_class = nullptr;

/// As py::gil_scoped_acquire, without its own bookkeeping per thread.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() {
    PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

/// Gives a new wrapper its Python class. A Python kernel (of a custom
/// operator) may have met the tensor first and made it a plain Tensor.
void type_at_birth(const at::Tensor& tensor) {
  if (!Py_IsInitialized()) {
    return;
  }
  const WithGil gil;
  PyObject* known = tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  if (known == nullptr) {
    Py_XDECREF(THPVariable_Wrap(tensor, tensor_class));
  } else if (
      Py_TYPE(known) == reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
    if (PyObject_SetAttrString(
            known, "__class__", reinterpret_cast<PyObject*>(tensor_class))) {
      throw py::error_already_set();
    }
  }
}

/// At each call PyTorch looks these up, by C string, in every argument and
/// result of a derived class; as new strings they miss Python's cache of
/// attributes.
PyObject* get_attribute(PyObject* self, char* name) {
  struct AskedFor {
    const char* text;
    PyObject* name = PyUnicode_InternFromString(text);
  };
  static const AskedFor asked_for[] = {
      {"__torch_function__"}, {"__torch_dispatch__"}};
  for (const auto& known : asked_for) {
    if (std::strcmp(known.text, name) == 0) {
      return PyObject_GetAttr(self, known.name);
    }
  }
  const auto other =
      py::reinterpret_steal<py::object>(PyUnicode_FromString(name));
  return other ? PyObject_GetAttr(self, other.ptr()) : nullptr;
}

void set_tensor_class(const py::type& type) {
  tensor_class = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());
  tensor_class->tp_getattr = &get_attribute;
  set_birth_hook(&type_at_birth);
}

void bind_access(py::module_& module) {
  module.def("set_tensor_class", &set_tensor_class, py::arg("type"));
  module.def("is_shard_tensor", &is_shard_tensor, py::arg("tensor"));
  module.def("keep_gradient_layout", &keep_gradient_layout, py::arg("tensor"));
  module.def(
      "spec",
      [](const at::Tensor& tensor) { return handle(spec(tensor)); },
      py::arg("tensor"));
  module.def(
      "local",
      [](const at::Tensor& tensor) { return impl_of(tensor)->local(); },
      py::arg("tensor"),
      "The local tensor itself, without autograd history.");
  module.def(
      "set_local",
      [](const at::Tensor& tensor, const at::Tensor& local) {
        auto* impl = impl_of(tensor);
        TORCH_CHECK_VALUE(
            local.sizes() == impl->local().sizes(),
            "_local_tensor: expected sizes ",
            impl->local().sizes(),
            ", got ",
            local.sizes());
        TORCH_CHECK_TYPE(
            local.dtype() == tensor.dtype() &&
                local.device() == tensor.device(),
            "_local_tensor: expected ",
            tensor.dtype(),
            " on ",
            tensor.device(),
            ", got ",
            local.dtype(),
            " on ",
            local.device());
        impl->set(local.detach(), impl->spec(), tensor.strides().vec());
      },
      py::arg("tensor"),
      py::arg("local"));
}

/// rand or randn; the dtype of `like`, on its device.
template <at::Tensor (*draw)(const SpecPtr&, const at::TensorOptions&)>
void bind_random(py::module_& module, const char* name) {
  module.def(
      name,
      [](const SpecHandle& spec, const at::Tensor& like) {
        return draw(spec, like.options());
      },
      ReleaseGil(),
      py::arg("spec"),
      py::arg("like"));
}

} // namespace

void bind_tensor(py::module_& module) {
  bind_access(module);
  bind_random<&rand>(module, "rand");
  bind_random<&randn>(module, "randn");
  module.def(
      "infer_spec",
      [](const at::Tensor& local,
         const MeshHandle& mesh,
         const std::vector<Placement>& placements,
         const std::string& alike) {
        return handle(infer_spec(local, mesh, placements, alike));
      },
      ReleaseGil(),
      py::arg("local"),
      py::arg("mesh"),
      py::arg("placements"),
      py::arg("alike"));
  module.def(
      "raise_in_infer_spec",
      [](const MeshHandle& mesh,
         const std::string& error_kind,
         const std::string& error) {
        raise_in_infer_spec(mesh, error_kind, error);
      },
      ReleaseGil(),
      py::arg("mesh"),
      py::arg("error_kind"),
      py::arg("error"));
  module.def(
      "from_local",
      [](const at::Tensor& local,
         const SpecHandle& spec,
         at::MemoryFormat format,
         const SpecHandle& grad_spec) {
        return from_local(local, spec, format, grad_spec);
      },
      ReleaseGil(),
      py::arg("local"),
      py::arg("spec"),
      py::arg("format") = at::MemoryFormat::Contiguous,
      py::arg("grad_spec") = SpecHandle());
  module.def(
      "check_replicas",
      [](const at::Tensor& local, const SpecHandle& spec) {
        check_replicas(local, spec);
      },
      ReleaseGil(),
      py::arg("local"),
      py::arg("spec"));
  module.def(
      "unflatten",
      [](const at::Tensor& local,
         const SpecHandle& spec,
         const std::vector<int64_t>& strides) {
        // A graph that writes into its input must see the input itself. A copy
        // of one whose sizes were symbols shows them as numbers.
        const bool had_symbols =
            local.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
        const auto part =
            local.requires_grad() || had_symbols ? local.detach() : local;
        const auto result = wrap(part, spec, strides);
        if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) {
          // A mode leaves the next call to __torch_dispatch__, which it finds
          // by the key: AOTAutograd's own does, in a graph's first run.
          result.unsafeGetTensorImpl()->set_python_dispatch(true);
        }
        return result;
      },
      ReleaseGil(),
      py::arg("local"),
      py::arg("spec").none(false),
      py::arg("strides"),
      "A new wrapper of given strides: what a compiled graph returns.");
  module.def(
      "to_local",
      [](const at::Tensor& tensor, const SpecHandle& grad_spec) {
        return to_local(tensor, grad_spec);
      },
      ReleaseGil(),
      py::arg("tensor"),
      py::arg("grad_spec") = SpecHandle());
  module.def(
      "redistribute",
      [](const at::Tensor& tensor, const SpecHandle& to) {
        return redistribute(tensor, SpecPtr(to));
      },
      ReleaseGil(),
      py::arg("tensor"),
      py::arg("to"));
  module.def(
      "redistribute",
      [](const at::Tensor& tensor,
         const std::vector<Placement>& placements,
         const ShardSpec::Partitions& partitions) {
        return redistribute(tensor, placements, partitions);
      },
      ReleaseGil(),
      py::arg("tensor"),
      py::arg("placements"),
      py::arg("partitions") = ShardSpec::Partitions());
  module.def(
      "full_tensor",
      [](const at::Tensor& tensor, const SpecHandle& grad_spec) {
        return full_tensor(tensor, grad_spec);
      },
      ReleaseGil(),
      py::arg("tensor"),
      py::arg("grad_spec") = SpecHandle());
  module.def(
      "promote",
      [](const at::Tensor& tensor, const MeshHandle& mesh) {
        return promote(tensor, mesh);
      },
      ReleaseGil(),
      py::arg("tensor"),
      py::arg("mesh"));
  module.def(
      "constant",
      [](const at::Tensor& value,
         const MeshHandle& mesh,
         const std::vector<int64_t>& sizes,
         bool is_zero) { return constant(value, mesh, sizes, is_zero); },
      ReleaseGil(),
      py::arg("value"),
      py::arg("mesh"),
      py::arg("sizes"),
      py::arg("is_zero") = false);
  module.def(
      "scatter",
      [](const at::Tensor& tensor,
         int64_t source,
         const SpecHandle& spec,
         at::MemoryFormat format) {
        return scatter(tensor, source, spec, format);
      },
      ReleaseGil(),
      py::arg("tensor"),
      py::arg("source"),
      py::arg("spec"),
      py::arg("format") = at::MemoryFormat::Contiguous);
}

} // namespace shardtensor::python
