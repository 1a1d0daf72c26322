#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "shardtensor/halo/halo_exchange.h"

namespace shardtensor::python {

using Widths = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

std::vector<Halo> halos_of(const Widths& widths) {
  std::vector<Halo> halos;
  for (const auto& [dim, before, after] : widths) {
    halos.push_back({dim, before, after});
  }
  return halos;
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
}

} // namespace shardtensor::python
