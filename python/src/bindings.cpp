#include "bindings.h"

#include <torch/csrc/Exceptions.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ core of shardtensor.";
  // Errors get the Python types that PyTorch's own functions raise.
  py::register_local_exception_translator([](std::exception_ptr error) {
    if (error) {
      torch::translate_exception_to_python(error);
    }
  });
  shardtensor::python::bind_layout(module);
  shardtensor::python::bind_distributed(module);
  shardtensor::python::bind_tensor(module);
  shardtensor::python::bind_dtensor(module);
  shardtensor::python::bind_modes(module);
  shardtensor::python::bind_dispatch(module);
  shardtensor::python::bind_comm(module);
  shardtensor::python::bind_halo(module);
  shardtensor::python::bind_graph(module);
  shardtensor::python::bind_checkpoint(module);
}
