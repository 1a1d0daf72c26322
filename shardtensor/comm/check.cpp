#include "shardtensor/comm/check.h"

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/check_mode.h"
#include "shardtensor/comm/known_error.h"
#include "shardtensor/comm/plain_tensors.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/threads/setting.h"

namespace shardtensor {

using namespace detail;

namespace {

Setting<bool> checking{"check_mode", false};

std::string full_text(const Collective& call) {
  const auto& scope = current_comm_scope();
  return scope.empty() ? call.text : call.text + " in " + scope;
}

/// What an undefined x is told from a host; elsewhere other messages go.
Collective on_device_of(const at::Tensor& x, Collective call) {
  if (x.defined() && !x.is_cpu()) {
    call.text += c10::str(" on ", c10::DeviceTypeName(x.device().type(), true));
  }
  return call;
}

/// A rank without a node would stay away from backward's messages.
Collective recorded_with(const at::Tensor& x, Collective call) {
  call.text += needs_node(x) ? ", which requires grad" : "";
  return call;
}

// ---- numbers that stand for a call ------------------------------------------

/// splitmix64's finalizer.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

uint64_t term(int64_t from, int64_t to, int64_t elements) {
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15ull;
  uint64_t result = 0;
  for (const auto number : {from, to, elements}) {
    result = mix(result + kStep + static_cast<uint64_t>(number));
  }
  return result;
}

// Note [Splits that match]
// A rank cannot look at all pairs of ranks: in a large group they are too many.
// So each message stands for a random number, by its ends and its size; a rank
// adds up those that it sends and takes away those that it expects. Over all
// ranks that is zero where they match, and else, but for one time in 2^64, not.
uint64_t imbalance(const Collective& call, int64_t rank) {
  uint64_t result = 0;
  for (const auto& [peer, elements] : call.sends) {
    result += term(rank, peer, elements);
  }
  for (const auto& [peer, elements] : call.receives) {
    result -= term(peer, rank, elements);
  }
  return result;
}

enum Column { kFailed, kText, kImbalance };

at::Tensor row_of(const std::optional<Collective>& call, int64_t rank) {
  if (!call) {
    return at::tensor({int64_t{1}, int64_t{0}, int64_t{0}});
  }
  const auto text = static_cast<int64_t>(hash_of_text(full_text(*call)));
  const auto rest = static_cast<int64_t>(imbalance(*call, rank));
  return at::tensor({int64_t{0}, text, rest});
}

/// rows: every rank's. The first rank that failed; -1: none.
int64_t first_failed(at::TensorAccessor<int64_t, 2> rows) {
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    if (rows[rank][kFailed] != 0) {
      return rank;
    }
  }
  return -1;
}

bool all_failed(at::TensorAccessor<int64_t, 2> rows) {
  int64_t failed = 0;
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    failed += rows[rank][kFailed];
  }
  return failed == rows.size(0);
}

bool agree(at::TensorAccessor<int64_t, 2> rows) {
  uint64_t rest = 0;
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    if (rows[rank][kText] != rows[0][kText]) {
      return false;
    }
    rest += static_cast<uint64_t>(rows[rank][kImbalance]);
  }
  return rest == 0;
}

// ---- errors -----------------------------------------------------------------

/// For each rank what it wants to do, one line each.
KnownError difference(const Group& group, const at::Tensor& texts) {
  std::string lines;
  for (int64_t rank = 0; rank < group.ranks(); ++rank) {
    lines += c10::str("\n  rank ", rank, ": ", error_from(texts[rank]).text);
  }
  return {
      KnownError::Kind::Value,
      c10::str(
          "shardtensor: the ranks of group '",
          group.name(),
          "' do not make the same call:",
          lines)};
}

KnownError error_of_rank(
    const Group& group,
    const at::Tensor& texts,
    int64_t rank,
    bool of_all) {
  auto error = error_from(texts[rank]);
  if (!of_all) {
    error.text +=
        c10::str(" (on rank ", rank, " of group '", group.name(), "')");
  }
  return error;
}

/// This rank's line, or its error.
KnownError told(
    const std::optional<Collective>& call,
    const std::optional<KnownError>& error) {
  return call
      ? KnownError{KnownError::Kind::Other, full_text(*call) + call->own}
      : *error;
}

void compare(
    const Group& group,
    const std::optional<Collective>& call,
    const std::optional<KnownError>& error) {
  const OnPlainTensors plain;
  const auto describe = [&] {
    return "the check before " + (call ? call->text : "a call that fails");
  };
  const auto device = group.device_of_numbers();
  const auto own = row_of(call, group.rank());
  const auto all = group.all_gather(own.to(device), describe).cpu();
  const auto rows = all.accessor<int64_t, 2>();
  const auto failed = first_failed(rows);
  if (failed < 0 && agree(rows)) {
    return;
  }
  const auto bytes = bytes_of(told(call, error)).to(device);
  const auto texts = group.all_gather(bytes, describe).cpu();
  raise(
      failed < 0 ? difference(group, texts)
                 : error_of_rank(group, texts, failed, all_failed(rows)));
}

} // namespace

void set_check_mode(bool on) {
  checking = on;
}

bool check_mode() {
  return checking;
}

uint64_t detail::hash_of_text(const std::string& text) {
  uint64_t result = 14695981039346656037ull; // FNV-1a
  for (const unsigned char c : text) {
    result = (result ^ c) * 1099511628211ull;
  }
  return result;
}

bool detail::is_tracing(const at::Tensor& x) {
  using Modes = c10::impl::TorchDispatchModeTLS;
  constexpr c10::DispatchKeySet kTraced(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  return x.is_meta() || x.key_set().has_any(kTraced) ||
      Modes::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value();
}

void detail::agree_on_call(
    const Group& group,
    const at::Tensor& x,
    c10::function_ref<Collective()> prepare) {
  if (group.ranks() == 1 || is_tracing(x)) {
    prepare();
    return;
  }
  std::optional<Collective> call;
  const auto error =
      error_of([&] { call = recorded_with(x, on_device_of(x, prepare())); });
  compare(group, call, error);
}

void detail::check_same_call(
    const Group& group,
    const at::Tensor& x,
    const Collective& call) {
  if (checking && group.ranks() > 1) {
    compare(group, on_device_of(x, call), std::nullopt);
  }
}

void agree_on_call(
    const at::Tensor& x,
    const std::string& text,
    const std::string& error_kind,
    const std::string& error,
    const std::string& group) {
  agree_on_call(Group(group), x, [&]() -> Collective {
    if (!error_kind.empty()) {
      raise({kind_named(error_kind), error});
    }
    return {text, "", {}, {}};
  });
}

} // namespace shardtensor
