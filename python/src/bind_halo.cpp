#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "shardtensor/halo/halo_exchange.h"
#include "shardtensor/halo/sphere.h"

namespace shardtensor::python {

using Widths = std::vector<std::tuple<int64_t, int64_t, int64_t>>;
using Pair = std::pair<int64_t, int64_t>;

std::vector<Halo> halos_of(const Widths& widths) {
  std::vector<Halo> halos;
  for (const auto& [dim, before, after] : widths) {
    halos.push_back({dim, before, after});
  }
  return halos;
}

SphereHalo on_sphere(
    const Pair& width,
    const Pair& dims,
    bool vector = false,
    bool pole_rows = false) {
  return {
      {width.first, width.second},
      {dims.first, dims.second},
      vector,
      pole_rows};
}

void bind_halo(py::module_& module) {
  module.def(
      "halo_exchange",
      [](const at::Tensor& x,
         const Widths& widths,
         const std::string& boundary) {
        return halo_exchange(x, halos_of(widths), parse_boundary(boundary));
      },
      ReleaseGil(),
      py::arg("x"),
      py::arg("widths"),
      py::arg("boundary"));
  module.def(
      "halo_trim",
      [](const at::Tensor& local,
         const SpecHandle& like,
         const Widths& widths,
         const std::string& boundary) {
        return halo_trim(
            local, like, halos_of(widths), parse_boundary(boundary));
      },
      ReleaseGil(),
      py::arg("local"),
      py::arg("like"),
      py::arg("widths"),
      py::arg("boundary"));
  module.def(
      "halo_exchange_on_sphere",
      [](const at::Tensor& x,
         const Pair& width,
         const Pair& dims,
         bool vector,
         bool pole_rows) {
        return halo_exchange_on_sphere(
            x, on_sphere(width, dims, vector, pole_rows));
      },
      ReleaseGil(),
      py::arg("x"),
      py::arg("width"),
      py::arg("dims"),
      py::arg("vector"),
      py::arg("pole_rows"));
  module.def(
      "halo_trim_on_sphere",
      [](const at::Tensor& local,
         const SpecHandle& like,
         const Pair& width,
         const Pair& dims) {
        return halo_trim_on_sphere(local, like, on_sphere(width, dims));
      },
      ReleaseGil(),
      py::arg("local"),
      py::arg("like"),
      py::arg("width"),
      py::arg("dims"));
}

} // namespace shardtensor::python
