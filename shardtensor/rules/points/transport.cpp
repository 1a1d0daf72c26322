#include "shardtensor/rules/points/transport.h"

#include "shardtensor/layout/enum_words.h"
#include "shardtensor/threads/setting.h"

namespace shardtensor {
namespace {

Setting<PointTransport> current_point_transport{
    "point_transport",
    PointTransport::Auto};

constexpr detail::EnumWords<PointTransport, 3> kPointTransports{
    "point_transport",
    {{
        {PointTransport::Auto, "auto"},
        {PointTransport::Ring, "ring"},
        {PointTransport::Boxes, "boxes"},
    }}};

} // namespace

void set_point_transport(PointTransport transport) {
  current_point_transport = transport;
}

PointTransport point_transport() {
  return current_point_transport;
}

const char* to_string(PointTransport transport) {
  return kPointTransports.word(transport);
}

PointTransport parse_point_transport(const std::string& name) {
  return kPointTransports.parse(name);
}

} // namespace shardtensor
