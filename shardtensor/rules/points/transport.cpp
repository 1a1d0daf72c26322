#include "shardtensor/rules/points/transport.h"

#include <atomic>

#include <c10/util/Exception.h>

namespace shardtensor {
namespace {

// Of the process, as the other settings.
std::atomic<PointTransport> current_point_transport{PointTransport::Auto};

constexpr PointTransport kPointTransports[] = {
    PointTransport::Auto,
    PointTransport::Ring,
    PointTransport::Boxes,
};

} // namespace

void set_point_transport(PointTransport transport) {
  current_point_transport = transport;
}

PointTransport point_transport() {
  return current_point_transport;
}

const char* to_string(PointTransport transport) {
  switch (transport) {
    case PointTransport::Auto:
      return "auto";
    case PointTransport::Ring:
      return "ring";
    case PointTransport::Boxes:
      return "boxes";
  }
  return "";
}

PointTransport parse_point_transport(const std::string& name) {
  for (const auto transport : kPointTransports) {
    if (name == to_string(transport)) {
      return transport;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "point_transport: expected 'auto', 'ring' or 'boxes', got '",
      name,
      "'");
}

} // namespace shardtensor
