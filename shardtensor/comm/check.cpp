#include "shardtensor/comm/check.h"

#include <algorithm>
#include <atomic>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "shardtensor/comm/check_mode.h"
#include "shardtensor/comm/scope.h"

namespace shardtensor {

using namespace detail;

namespace {

std::atomic<bool> checking{false};

constexpr int64_t kTextBytes = 512; // of a call's description

/// FNV-1a: the same on every machine, unlike std::hash.
int64_t hash(const std::string& text) {
  uint64_t result = 14695981039346656037ull;
  for (const unsigned char c : text) {
    result = (result ^ c) * 1099511628211ull;
  }
  return static_cast<int64_t>(result);
}

std::string full_text(const Collective& call) {
  const auto& scope = current_comm_scope();
  return scope.empty() ? call.text : call.text + " in " + scope;
}

at::Tensor fingerprint(const Collective& call, int64_t ranks) {
  std::vector<int64_t> row{hash(full_text(call))};
  for (const auto* splits : {&call.sends, &call.receives}) {
    const auto elements = of_every_rank(*splits, ranks);
    row.insert(row.end(), elements.begin(), elements.end());
  }
  return at::tensor(row);
}

/// rows: every rank's fingerprint.
bool agree(const at::Tensor& rows) {
  const int64_t ranks = rows.size(0);
  const auto table = rows.accessor<int64_t, 2>();
  for (int64_t i = 0; i < ranks; ++i) {
    if (table[i][0] != table[0][0]) {
      return false;
    }
    for (int64_t j = 0; j < ranks; ++j) {
      if (table[i][1 + j] != table[j][1 + ranks + i]) {
        return false;
      }
    }
  }
  return true;
}

/// For each rank what it wants to do, one line each.
std::string all_calls(
    const Group& group,
    c10::Device device,
    const Collective& call,
    Describe describe) {
  std::string text = full_text(call);
  if (!call.sends.empty() || !call.receives.empty()) {
    text += c10::str(
        " (elements sent: ",
        to_string(call.sends),
        "; received: ",
        to_string(call.receives),
        ")");
  }
  at::Tensor row = at::zeros({kTextBytes}, at::kByte);
  const auto length = std::min<int64_t>(text.size(), kTextBytes - 1);
  std::copy_n(text.begin(), length, row.data_ptr<uint8_t>());
  const at::Tensor rows = group.all_gather(row.to(device), describe).cpu();
  std::string lines;
  for (int64_t rank = 0; rank < group.ranks(); ++rank) {
    const auto* bytes = rows[rank].const_data_ptr<uint8_t>();
    lines +=
        c10::str("\n  rank ", rank, ": ", reinterpret_cast<const char*>(bytes));
  }
  return lines;
}

} // namespace

void set_check_mode(bool on) {
  checking = on;
}

bool check_mode() {
  return checking;
}

void detail::check_same_call(
    const Group& group,
    c10::Device device,
    const Collective& call) {
  if (!checking || group.ranks() == 1) {
    return;
  }
  const auto describe = [&] { return "the check before " + call.text; };
  const at::Tensor row = fingerprint(call, group.ranks()).to(device);
  if (!agree(group.all_gather(row, describe).cpu())) {
    const std::string lines = all_calls(group, device, call, describe);
    TORCH_CHECK(
        false,
        "shardtensor: the ranks of group '",
        group.name(),
        "' do not make the same call:",
        lines);
  }
}

} // namespace shardtensor
