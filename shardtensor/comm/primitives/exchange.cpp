#include "shardtensor/comm/primitives/exchange.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/check_mode.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/own_operator.h"
#include "shardtensor/comm/primitives/exchange_boxes.h"
#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/comm/primitives/exchange_schedule.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/stats.h"

namespace shardtensor {

using namespace detail;

namespace {

using torch::autograd::variable_list;

// An exchange is: copy what stays, and for each round of peers pack what goes
// to them into one flat buffer, one all-to-all, unpack what they sent.

// ---- the target -------------------------------------------------------------

/// The source's memory format, where the target can have it.
at::MemoryFormat format_for(const at::Tensor& x, size_t dim) {
  return static_cast<size_t>(x.dim()) == dim ? x.suggest_memory_format()
                                             : at::MemoryFormat::Contiguous;
}

at::MemoryFormat channels_last(size_t dim) {
  return dim == 5 ? at::MemoryFormat::ChannelsLast3d
                  : at::MemoryFormat::ChannelsLast;
}

at::Tensor empty_target(
    const at::Tensor& x,
    c10::IntArrayRef sizes,
    const ExchangeCode& code) {
  const auto dim = sizes.size();
  const auto format =
      code.channels_last ? channels_last(dim) : format_for(x, dim);
  return at::empty(sizes, x.options().memory_format(format));
}

/// Of a schedule's code.
at::Tensor make_target(const at::Tensor& x, const ExchangeCode& code) {
  const auto& sizes = code.target.sizes;
  const auto result = code.channels_last
      ? empty_target(x, in_order_of_dims(sizes), code)
      : empty_target(x, sizes, code);
  return code.target.starts_at_zero ? result.zero_() : result;
}

/// A view with the dims that the schedule's boxes have.
at::Tensor in_order_of_boxes(const at::Tensor& x, const ExchangeCode& code) {
  return code.channels_last ? x.movedim(1, -1) : x;
}

// ---- rounds -----------------------------------------------------------------

std::string describe(
    const at::Tensor& x,
    const Splits& sends,
    const Splits& receives) {
  return c10::str(
      "shardtensor::exchange of a ",
      x.scalar_type(),
      " tensor ",
      x.sizes(),
      " (elements sent: ",
      to_string(sends),
      "; received: ",
      to_string(receives),
      ')');
}

int64_t total(const Splits& splits) {
  int64_t elements = 0;
  for (const auto& split : splits) {
    elements += split.elements;
  }
  return elements;
}

void count_sends(const Splits& sends, int64_t element_size) {
  count_exchange(
      static_cast<int64_t>(sends.size()), total(sends) * element_size);
}

void check_exchange(
    const at::Tensor& x,
    const ExchangeSchedule& schedule,
    const Group& group) {
  if (!check_mode()) {
    return;
  }
  const auto& largest = schedule.code.largest_message;
  check_same_call(
      group,
      x,
      {c10::str(
           "shardtensor::exchange of a ",
           x.scalar_type(),
           " tensor",
           largest ? c10::str(", messages of at most ", *largest, " elements")
                   : "",
           schedule.code.channels_last ? ", channels last" : ""),
       c10::str(
           " (elements sent: ",
           to_string(schedule.sent),
           "; received: ",
           to_string(schedule.received),
           ")"),
       schedule.sent,
       schedule.received});
}

/// As a profiler shows it: what travels, to whom and for which operator.
std::string profiled_name(const Splits& sends, int64_t element_size) {
  std::vector<int64_t> peers;
  for (const auto& split : sends) {
    peers.push_back(split.rank);
  }
  return c10::str(
      "shardtensor::messages (",
      total(sends) * element_size,
      " bytes to ranks ",
      c10::IntArrayRef(peers),
      ") ",
      current_comm_scope());
}

/// The same answer on all ranks of the group.
bool gathers_at_once(
    const at::Tensor& x,
    const ExchangeSchedule& schedule,
    const Group& group) {
  return schedule.code.gathers && !schedule.own_target.adds && x.numel() > 0 &&
      group.gathers_at_once(x);
}

/// `meanwhile` runs once, before target is written but where the messages are
/// received in place.
void exchange_in_rounds(
    const at::Tensor& target,
    const at::Tensor& x,
    const ExchangeSchedule& schedule,
    const Group& group,
    c10::function_ref<void()> meanwhile) {
  const auto& code = schedule.code;
  const bool late = code.target.in_rank_order;
  std::vector<Received> received;
  bool first = true;
  for (const auto& round : schedule.rounds) {
    const auto& sends = round.sends;
    Received r{round.receives, {}};
    if (!late && !r.messages.adds) {
      r.buffer = in_place_buffer(target, r.messages);
    }
    const bool direct = r.buffer.defined();
    if (!direct) {
      r.buffer = at::empty({r.messages.numel}, x.options());
    }
    group.all_to_all(
        r.buffer,
        r.messages.splits,
        pack(x, sends),
        sends.splits,
        {code.largest_message, code.peers},
        [&] { return describe(x, sends.splits, r.messages.splits); },
        [&] {
          if (first) {
            meanwhile();
          }
          if (first && !late) {
            copy_own(target, x, schedule);
          }
        });
    first = false;
    if (late) {
      received.push_back(std::move(r));
    } else if (!direct) {
      unpack(target, r.buffer, r.messages);
    }
  }
  if (late) {
    write_in_rank_order(target, x, schedule, received);
  }
}

void exchange_messages(
    const at::Tensor& target,
    const at::Tensor& x,
    const ExchangeSchedule& schedule,
    const Group& group,
    c10::function_ref<void()> meanwhile) {
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  if (profiled.isActive()) {
    profiled.before(profiled_name(schedule.sent, x.element_size()));
  }
  if (gathers_at_once(x, schedule, group)) {
    meanwhile();
    group.all_gather_into(target.view({-1}), x.reshape({-1}), [&] {
      return describe(x, schedule.sent, schedule.received);
    });
  } else {
    exchange_in_rounds(target, x, schedule, group, meanwhile);
  }
  count_sends(schedule.sent, x.element_size());
}

// ---- kernels ----------------------------------------------------------------

/// x as the schedule's boxes see it.
at::Tensor checked_source(const at::Tensor& x, const ExchangeCode& code) {
  const auto& boxed = code.source.sizes;
  const auto sizes = code.channels_last
      ? in_order_of_dims(boxed)
      : at::DimVector(boxed.begin(), boxed.end());
  TORCH_CHECK_VALUE(
      x.sizes() == c10::IntArrayRef(sizes),
      "shardtensor::exchange: the local tensor has sizes ",
      x.sizes(),
      ", the plan expects ",
      c10::IntArrayRef(sizes));
  return in_order_of_boxes(x, code);
}

/// As the dispatcher hands a tensor to the operator.
at::Tensor resolved(const at::Tensor& x) {
  return x.is_conj() || x.is_neg() ? x.resolve_conj().resolve_neg() : x;
}

/// Writes target, which may be made by `meanwhile`.
void run_exchange(
    const at::Tensor& target,
    const at::Tensor& x,
    const ExchangeSchedule& schedule,
    const std::string& group_name,
    c10::function_ref<void()> meanwhile) {
  const auto& exchange = schedule.code;
  const bool silent = exchange.largest_message == 0;
  if (silent && (group_name.empty() || !check_mode())) {
    meanwhile();
    copy_own(target, x, schedule);
    return;
  }
  const Group group(group_name);
  TORCH_CHECK_VALUE(
      group.rank() == exchange.rank && group.ranks() == exchange.ranks,
      "shardtensor::exchange: the plan is for rank ",
      exchange.rank,
      " of ",
      exchange.ranks,
      ", this is ",
      group.to_string());
  check_exchange(x, schedule, group);
  if (silent) {
    meanwhile();
    copy_own(target, x, schedule);
  } else {
    exchange_messages(target, x, schedule, group, meanwhile);
  }
}

at::Tensor exchange_meta(
    const at::Tensor& x,
    c10::IntArrayRef code,
    std::string) {
  const auto exchange = decode(code);
  return empty_target(x, exchange.target.sizes, exchange);
}

at::Tensor exchange_to_new(
    const at::Tensor& x,
    c10::IntArrayRef code,
    const std::string& group_name,
    c10::function_ref<void()> meanwhile) {
  if (x.is_meta()) {
    meanwhile();
    return exchange_meta(x, code, group_name);
  }
  const auto schedule = find_schedule(code, x);
  const auto source = checked_source(x, schedule->code);
  const at::Tensor target = make_target(x, schedule->code);
  run_exchange(
      in_order_of_boxes(target, schedule->code),
      source,
      *schedule,
      group_name,
      meanwhile);
  return target;
}

at::Tensor exchange_kernel(
    const at::Tensor& x,
    c10::IntArrayRef code,
    std::string group_name) {
  return exchange_to_new(x, code, group_name, [] {});
}

// ---- autograd ---------------------------------------------------------------

using ExchangeSignature =
    at::Tensor(const at::Tensor&, c10::IntArrayRef, std::string);

const auto& exchange_operator() {
  static const auto op =
      find_own_operator<ExchangeSignature>("shardtensor::exchange");
  return op;
}

class ExchangeBackward : public torch::autograd::Node {
 public:
  ExchangeBackward(c10::IntArrayRef code, const std::string& group)
      : code_(code.vec()), group_(group), scope_(current_comm_scope()) {}

  std::string name() const override {
    return "ShardTensorExchangeBackward";
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) {
      return {at::Tensor()};
    }
    const CommScope scope(backward_of(scope_));
    return {exchange_operator().call(gradients[0], adjoint(code_), group_)};
  }

 private:
  std::vector<int64_t> code_;
  std::string group_;
  std::string scope_;
};

at::Tensor exchange_autograd(
    c10::DispatchKeySet keys,
    const at::Tensor& x,
    c10::IntArrayRef code,
    std::string group) {
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = exchange_operator().redispatch(
        keys & c10::after_autograd_keyset, x, code, group);
  }
  connect<ExchangeBackward>(result, x, code, group);
  const at::Tensor tangent = x._fw_grad(/*level=*/0);
  if (tangent.defined()) {
    result._set_fw_grad(
        exchange_operator().call(tangent, code, group),
        /*level=*/0,
        /*is_inplace_op=*/false);
  }
  return result;
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("exchange", exchange_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("exchange", exchange_meta);
}
TORCH_LIBRARY_IMPL(shardtensor, Autograd, m) {
  m.impl("exchange", exchange_autograd);
}

} // namespace

// ---- the C++ interface ------------------------------------------------------

EncodedExchange encode(const ExchangePlan& plan, const Mesh& mesh) {
  std::vector<int64_t> rank_of(mesh.ranks());
  for (int64_t position = 0; position < mesh.ranks(); ++position) {
    rank_of[position] =
        plan.axis < 0 ? position : mesh.coordinate(position, plan.axis);
  }
  if (!mesh.contains_this_rank()) {
    ExchangePlan silent = plan;
    silent.largest_message = 0;
    return {encode(silent, -1, rank_of), ""};
  }
  const auto& group = plan.axis < 0 ? mesh.group() : mesh.group(plan.axis);
  return {encode(plan, rank_of[mesh.position()], rank_of), group};
}

at::Tensor exchange(
    const at::Tensor& x,
    const EncodedExchange& encoded,
    at::MemoryFormat format) {
  if (is_channels_last(format)) {
    const auto [code, group] = in_format(encoded, format);
    return exchange_operator().call(x, code, group);
  }
  return exchange_operator().call(x, encoded.code, encoded.group);
}

EncodedExchange adjoint(const EncodedExchange& encoded) {
  return {adjoint(encoded.code), encoded.group};
}

at::Tensor exchange_during(
    const at::Tensor& x,
    const EncodedExchange& encoded,
    c10::function_ref<void()> meanwhile) {
  return exchange_to_new(resolved(x), encoded.code, encoded.group, meanwhile);
}

void exchange_onto(
    at::Tensor& target,
    const at::Tensor& x,
    const EncodedExchange& encoded,
    c10::function_ref<void()> meanwhile) {
  if (x.is_meta()) {
    meanwhile();
    return;
  }
  const auto schedule = find_schedule(encoded.code, x, /*adds=*/true);
  const auto source = checked_source(resolved(x), schedule->code);
  at::Tensor boxed;
  run_exchange(boxed, source, *schedule, encoded.group, [&] {
    meanwhile();
    boxed = in_order_of_boxes(target, schedule->code);
  });
}

at::Tensor exchange(
    const at::Tensor& x,
    const ExchangePlan& plan,
    const Mesh& mesh) {
  return exchange(x, encode(plan, mesh));
}

} // namespace shardtensor
