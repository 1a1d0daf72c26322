#include <functional>
#include <optional>
#include <string>

#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>

#include "bindings.h"
#include "shardtensor/collectives/fused_all_reduce.h"
#include "shardtensor/collectives/ring.h"
#include "shardtensor/collectives/shared_parameters.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/comm/roll_call.h"
#include "shardtensor/comm/wire.h"

namespace shardtensor::python {

namespace {

/// Gives up the GIL where the caller holds it.
void* release_gil() {
  return Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread()
                                                  : nullptr;
}

void take_gil_back(void* state) {
  if (state) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(state));
  }
}

std::pair<std::string, std::string> kind_and_text(
    py::handle type,
    py::handle value) {
  const auto is = [&](PyObject* kind) {
    return PyErr_GivenExceptionMatches(type.ptr(), kind) != 0;
  };
  const auto* const kind = is(PyExc_ValueError) ? "ValueError"
      : is(PyExc_IndexError)                    ? "IndexError"
      : is(PyExc_TypeError)                     ? "TypeError"
                                                : "RuntimeError";
  return {kind, py::str(value)};
}

/// What a function of Python raises, also in a backward, for ranks that have
/// not called it.
ForeignError read_python_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const py::error_already_set& python) {
    const py::gil_scoped_acquire gil;
    return kind_and_text(python.type(), python.value());
  } catch (const python_error& python) {
    const py::gil_scoped_acquire gil;
    return kind_and_text(python.type, python.value);
  } catch (...) {
    return std::nullopt;
  }
}

using Sizes = std::vector<std::vector<int64_t>>;

/// `visit` takes the GIL for itself.
void tour(
    const at::Tensor& block,
    const Sizes& sizes,
    const std::string& group,
    int64_t rank,
    const std::function<void(int64_t, at::Tensor)>& visit) {
  RingStops stops;
  stops.own = [&] { visit(rank, block.detach()); };
  stops.other = [&](int64_t owner, const at::Tensor& piece) {
    visit(owner, piece);
    return at::Tensor();
  };
  ring_tour(block, sizes, group, stops);
}

/// `term` takes the GIL for itself.
at::Tensor sum_around(
    const std::function<at::Tensor(at::Tensor, std::vector<at::Tensor>)>& term,
    const at::Tensor& block,
    const std::vector<at::Tensor>& own,
    const Sizes& sizes,
    const std::string& group) {
  return ring_sum(term, block, own, sizes, group);
}

} // namespace

void bind_comm(py::module_& module) {
  set_wait_hooks(release_gil, take_gil_back);
  module.def(
      "all_reduce",
      [](const at::Tensor& x,
         const std::string& reduce,
         const std::string& group) {
        return all_reduce(x, parse_reduce(reduce), group);
      },
      ReleaseGil(),
      py::arg("x"),
      py::arg("reduce"),
      py::arg("group"));
  module.def(
      "fused_dtype",
      [](const std::vector<at::Tensor>& tensors, const std::string& reduce) {
        return fused_dtype(tensors, parse_reduce(reduce));
      },
      py::arg("tensors"),
      py::arg("reduce"));
  module.def(
      "fuse",
      &fuse,
      ReleaseGil(),
      py::arg("tensors"),
      py::arg("dtype"),
      py::arg("device"));
  module.def(
      "split_like",
      &split_like,
      ReleaseGil(),
      py::arg("buffer"),
      py::arg("tensors"));
  module.def(
      "average", &average, ReleaseGil(), py::arg("sum"), py::arg("ranks"));
  module.def(
      "share_gradients",
      &share_gradients,
      ReleaseGil(),
      py::arg("parameters"),
      py::arg("group"),
      py::arg("use_fp32_reduction"));
  module.def(
      "unshare_gradients",
      &unshare_gradients,
      ReleaseGil(),
      py::arg("parameters"));
  module.def(
      "to_wire",
      [](const at::Tensor& x, const std::string& reduce) {
        const auto kind = parse_reduce(reduce);
        return std::make_pair(
            to_wire(x, kind), std::string(to_string(wire_reduce(x, kind))));
      },
      py::arg("x"),
      py::arg("reduce"));
  module.def(
      "from_wire",
      [](const at::Tensor& wire,
         const at::Tensor& x,
         const std::string& reduce) {
        return from_wire(wire, x, parse_reduce(reduce));
      },
      py::arg("wire"),
      py::arg("x"),
      py::arg("reduce"));
  module.def("who_is_missing", &who_is_missing, ReleaseGil(), py::arg("group"));
  module.def(
      "agree_on_call",
      &agree_on_call,
      ReleaseGil(),
      py::arg("x"),
      py::arg("text"),
      py::arg("error_kind"),
      py::arg("error"),
      py::arg("group"));
  set_foreign_error_reader(read_python_error);
  module.def(
      "ring_tour",
      &tour,
      ReleaseGil(),
      py::arg("block"),
      py::arg("sizes"),
      py::arg("group"),
      py::arg("rank"),
      py::arg("visit"));
  module.def(
      "ring_sum",
      &sum_around,
      ReleaseGil(),
      py::arg("term"),
      py::arg("block"),
      py::arg("own"),
      py::arg("sizes"),
      py::arg("group"));
  module.def("check_mode", &check_mode);
  module.def("set_check_mode", &set_check_mode, py::arg("on"));
  module.def(
      "set_communication_timeout",
      &set_communication_timeout,
      py::arg("seconds"));
  py::class_<CommStats>(module, "CommStats")
      .def_readonly("exchanges", &CommStats::exchanges)
      .def_readonly("all_reduces", &CommStats::all_reduces)
      .def_readonly("messages", &CommStats::messages)
      .def_readonly("bytes", &CommStats::bytes)
      .def_readonly("seconds", &CommStats::seconds)
      .def_readonly("plans", &CommStats::plans)
      .def("__repr__", [](const CommStats& stats) {
        return c10::str(
            "CommStats(exchanges=",
            stats.exchanges,
            ", all_reduces=",
            stats.all_reduces,
            ", messages=",
            stats.messages,
            ", bytes=",
            stats.bytes,
            ", seconds=",
            stats.seconds,
            ", plans=",
            stats.plans,
            ")");
      });
  module.def("comm_stats", &comm_stats);
  module.def("reset_comm_stats", &reset_comm_stats);
}

} // namespace shardtensor::python
