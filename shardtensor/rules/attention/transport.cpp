#include "shardtensor/rules/attention/transport.h"

#include "shardtensor/layout/enum_words.h"
#include "shardtensor/threads/setting.h"

namespace shardtensor {
namespace {

Setting<AttentionTransport> current{
    "attention_transport",
    AttentionTransport::Auto};

constexpr detail::EnumWords<AttentionTransport, 5> kTransports{
    "attention_transport",
    {{
        {AttentionTransport::Auto, "auto"},
        {AttentionTransport::Ring, "ring"},
        {AttentionTransport::AllGather, "all_gather"},
        {AttentionTransport::AllToAll, "all_to_all"},
        {AttentionTransport::Grid, "grid"},
    }}};

} // namespace

void set_attention_transport(AttentionTransport transport) {
  current = transport;
}

AttentionTransport attention_transport() {
  return current;
}

const char* to_string(AttentionTransport transport) {
  return kTransports.word(transport);
}

AttentionTransport parse_attention_transport(const std::string& name) {
  return kTransports.parse(name);
}

} // namespace shardtensor
