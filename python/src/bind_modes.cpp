#include <string>

#include "bindings.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/rules/attention/transport.h"
#include "shardtensor/rules/points/transport.h"
#include "shardtensor/rules/stencil/overlap_bytes.h"
#include "shardtensor/tensor/gradients/gradient_readers.h"
#include "shardtensor/tensor/gradients/parameter_gradients.h"
#include "shardtensor/tensor/random.h"
#include "shardtensor/threads/setting.h"

namespace shardtensor::python {

void bind_modes(py::module_& module) {
  module.def("hold_setting", &hold_setting, py::arg("name"));
  module.def(
      "release_setting", &release_setting, py::arg("name"), py::arg("before"));

  module.def("promotion_mode", [] { return to_string(promotion_mode()); });
  module.def(
      "set_promotion_mode",
      [](const std::string& mode) {
        set_promotion_mode(parse_promotion_mode(mode));
      },
      py::arg("mode"));

  module.def("fallback_mode", [] { return to_string(fallback_mode()); });
  module.def(
      "set_fallback_mode",
      [](const std::string& mode) {
        set_fallback_mode(parse_fallback_mode(mode));
      },
      py::arg("mode"));
  module.def("fallback_counts", [] {
    py::dict result;
    for (const auto& count : fallback_counts()) {
      result[py::str(count.op)] = py::make_tuple(count.calls, count.elements);
    }
    return result;
  });
  module.def("reset_fallback_counts", &reset_fallback_counts);

  module.def("gradient_policy", [] { return to_string(gradient_policy()); });
  module.def(
      "set_gradient_policy",
      [](const std::string& policy) {
        set_gradient_policy(parse_gradient_policy(policy));
      },
      py::arg("policy"));
  module.def("note_reader", &note_reader, py::arg("leaf"), py::arg("ranks"));
  module.def(
      "set_gradient_readers",
      [](const py::function& tell) {
        set_gradient_readers([held = tell.inc_ref()] {
          const py::gil_scoped_acquire gil;
          held();
        });
      },
      py::arg("tell"));
  module.def("gradient_bucket_bytes", &gradient_bucket_bytes);
  module.def(
      "set_gradient_bucket_bytes",
      &set_gradient_bucket_bytes,
      py::arg("bytes"));

  module.def(
      "attention_transport", [] { return to_string(attention_transport()); });
  module.def(
      "set_attention_transport",
      [](const std::string& transport) {
        set_attention_transport(parse_attention_transport(transport));
      },
      py::arg("transport"));
  module.def("point_transport", [] { return to_string(point_transport()); });
  module.def(
      "set_point_transport",
      [](const std::string& transport) {
        set_point_transport(parse_point_transport(transport));
      },
      py::arg("transport"));
  module.def("conv_overlap_bytes", &conv_overlap_bytes);
  module.def(
      "set_conv_overlap_bytes", &set_conv_overlap_bytes, py::arg("bytes"));
  module.def("random_policy", [] { return to_string(random_policy()); });
  module.def(
      "set_random_policy",
      [](const std::string& policy) {
        set_random_policy(parse_random_policy(policy));
      },
      py::arg("policy"));
}

} // namespace shardtensor::python
