#include "shardtensor/rules/attention/transport.h"

#include <atomic>

#include <c10/util/Exception.h>

namespace shardtensor {
namespace {

// Of the process: backward and compiled functions run on other threads.
std::atomic<AttentionTransport> current{AttentionTransport::Auto};

constexpr AttentionTransport kAll[] = {
    AttentionTransport::Auto,
    AttentionTransport::Ring,
    AttentionTransport::AllGather,
    AttentionTransport::AllToAll,
    AttentionTransport::Grid,
};

} // namespace

void set_attention_transport(AttentionTransport transport) {
  current = transport;
}

AttentionTransport attention_transport() {
  return current;
}

const char* to_string(AttentionTransport transport) {
  switch (transport) {
    case AttentionTransport::Auto:
      return "auto";
    case AttentionTransport::Ring:
      return "ring";
    case AttentionTransport::AllGather:
      return "all_gather";
    case AttentionTransport::AllToAll:
      return "all_to_all";
    case AttentionTransport::Grid:
      return "grid";
  }
  return "";
}

AttentionTransport parse_attention_transport(const std::string& name) {
  for (const auto transport : kAll) {
    if (name == to_string(transport)) {
      return transport;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "attention_transport: expected 'auto', 'ring', 'all_gather', 'all_to_all' "
      "or 'grid', got '",
      name,
      "'");
}

} // namespace shardtensor
