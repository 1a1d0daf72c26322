#include "shardtensor/comm/group.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardtensor/comm/messages.h"
#include "shardtensor/comm/roll_call.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/stats.h"
#include "shardtensor/comm/wait.h"

namespace shardtensor::detail {

namespace {

using Clock = std::chrono::steady_clock;
using Work = c10::intrusive_ptr<c10d::Work>;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// ---- errors -----------------------------------------------------------------

/// The first line of an error's text, without c10's backtrace.
std::string first_line(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      c10_error ? c10_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

[[noreturn]] void raise_backend_error(
    const Group& group,
    const std::string& what,
    const std::string& cause) {
  const auto& scope = current_comm_scope();
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          what,
          scope.empty() ? "" : " in ",
          scope,
          " failed on ",
          group.to_string(),
          ": ",
          cause,
          "\nThe group cannot be used any more. Another rank may have died, "
          "raised, or called something else."));
}

// ---- waiting ----------------------------------------------------------------

/// For backends that hold up the host: set_communication_timeout's. A queued
/// call is bounded by its group's own limit, see Note [Queues].
std::chrono::milliseconds limit_for(ProcessGroup& group, const at::Tensor& x) {
  return is_queued(*group, x) ? std::chrono::milliseconds(0)
                              : communication_timeout();
}

/// Backends that ran on the current stream return no work.
void wait(const Work& work, std::chrono::milliseconds limit) {
  if (!work) {
    return;
  }
  TORCH_CHECK(work->wait(limit), "the work was aborted");
}

/// gloo then ends the operation itself, so that nothing is left running that
/// would keep the process from ending.
template <typename Options>
Options bounded(std::chrono::milliseconds limit) {
  Options options;
  if (limit.count() > 0) {
    options.timeout = limit;
  }
  return options;
}

/// The same for a call that nothing runs beside.
template <typename Options>
Options alone(
    ProcessGroup& group,
    const at::Tensor& x,
    std::chrono::milliseconds limit) {
  auto options = bounded<Options>(limit);
  options.asyncOp = !is_queued(*group, x);
  return options;
}

// Note [Python and gloo's threads]
// A work keeps a copy of the caller's thread-local state, Python objects among
// it (backward leaves one there, saved tensor hooks are others), and gloo's own
// thread frees it: with the lock of gloo's queue in hand it waits for the GIL.
// A caller that waits for that lock with the GIL in hand waits for ever, and an
// interpreter that ends meanwhile ends the process. So works are started
// without Python's state, and without the GIL.
struct PythonState {
  at::impl::ThreadLocalPythonObjects objects;
  at::impl::PythonTorchFunctionTLS functions;
  at::impl::SavedTensorDefaultHooksTLS saved;

  static PythonState current() {
    return {
        at::impl::ThreadLocalPythonObjects::get_state(),
        at::impl::PythonTorchFunctionTLS::get_state(),
        at::SavedTensorDefaultHooks::get_tls_state()};
  }
  void enter() const {
    at::impl::ThreadLocalPythonObjects::set_state(objects);
    at::impl::PythonTorchFunctionTLS::set_state(functions);
    at::SavedTensorDefaultHooks::set_tls_state(saved);
  }
};

/// Under `state` while it lives.
class UnderPythonState {
 public:
  explicit UnderPythonState(const PythonState& state)
      : outer_(PythonState::current()) {
    state.enter();
  }
  ~UnderPythonState() {
    outer_.enter();
  }
  UnderPythonState(const UnderPythonState&) = delete;
  UnderPythonState& operator=(const UnderPythonState&) = delete;

  const PythonState& outer() const {
    return outer_;
  }

 private:
  PythonState outer_;
};

/// Of a message that does not come: its other end is known.
struct PeerError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void wait(const PeerWork& under_way, std::chrono::milliseconds limit) {
  try {
    wait(under_way.work, limit);
  } catch (const std::exception& error) {
    const auto peer = under_way.peer;
    if (peer < 0) {
      throw;
    }
    throw PeerError(
        c10::str("waiting for rank ", peer, ": ", first_line(error)));
  }
}

/// call(), which talks to the backend and gets the caller's state, under which
/// it runs what is the caller's; any failure names what was under way, and whom
/// it waited for.
template <typename Call>
auto talk(const Group& group, Describe describe, Call call) {
  try {
    const UnderPythonState none({}); // Note [Python and gloo's threads]
    const WaitHooks hooks;
    return call(none.outer());
  } catch (const PeerError& error) {
    raise_backend_error(group, describe(), error.what());
  } catch (const std::exception& error) {
    const auto cause = first_line(error);
    const WaitHooks hooks;
    raise_backend_error(
        group, describe(), cause + who_is_missing(group.name()));
  }
}

void wait_for_all(const Works& works, std::chrono::milliseconds limit) {
  const auto begin = Clock::now();
  for (const auto& under_way : works) {
    wait(under_way, limit);
  }
  count_wait(std::chrono::duration<double>(Clock::now() - begin).count());
}

/// start() -> Works, meanwhile(), wait. What `meanwhile` raises comes after the
/// wait: all ranks raise it, and none leaves a message behind.
template <typename Start>
void run(
    const Group& group,
    Describe describe,
    std::chrono::milliseconds limit,
    Start start,
    c10::function_ref<void()> meanwhile) {
  std::exception_ptr failure;
  talk(group, describe, [&](const PythonState& callers) {
    const Works works = start();
    try {
      const UnderPythonState as_called(callers);
      meanwhile();
    } catch (...) {
      failure = std::current_exception();
    }
    wait_for_all(works, limit);
  });
  if (failure) {
    std::rethrow_exception(failure);
  }
}

/// start() -> Works now; the wait, then finish(), when somebody waits.
template <typename Start, typename Finish>
Started run_beside(
    const Group& group,
    const std::string& what,
    std::chrono::milliseconds limit,
    Start start,
    Finish finish) {
  const auto describe = [&] { return what; };
  const auto works =
      talk(group, describe, [&](const PythonState&) { return start(); });
  return Started([=] {
    talk(
        group,
        [&] { return what; },
        [&](const PythonState&) { wait_for_all(works, limit); });
    finish();
  });
}

// ---- c10d's vocabulary ------------------------------------------------------

c10d::ReduceOp to_c10d(Reduce reduce) {
  switch (reduce) {
    case Reduce::Sum:
      return c10d::ReduceOp::SUM;
    case Reduce::Prod:
      return c10d::ReduceOp::PRODUCT;
    case Reduce::Max:
      return c10d::ReduceOp::MAX;
    case Reduce::Min:
      return c10d::ReduceOp::MIN;
    case Reduce::Avg:
      break; // gloo has none
  }
  TORCH_INTERNAL_ASSERT(false, "an average is a sum, divided");
}

/// Pure data movement needs no dtype, and backends lack some. A single element
/// is contiguous with any stride, but only stride 1 can be read as bytes.
at::Tensor as_bytes(const at::Tensor& flat) {
  const bool dense = flat.stride(0) == 1;
  return (dense ? flat : flat.as_strided({flat.numel()}, {1})).view(at::kByte);
}

Splits times(Splits splits, int64_t by) {
  for (auto& split : splits) {
    split.elements *= by;
  }
  return splits;
}

/// The parts of a flat tensor.
RankTensors parts(const at::Tensor& flat, const Splits& splits) {
  RankTensors result;
  result.reserve(splits.size());
  int64_t begin = 0;
  for (const auto& [rank, elements] : splits) {
    result.push_back({rank, flat.narrow(0, begin, elements)});
    begin += elements;
  }
  return result;
}

/// PyTorch 2.13 renamed alltoall_base.
template <typename ProcessGroup, typename... Args>
Work start_all_to_all(ProcessGroup& group, Args&... args) {
  if constexpr (requires { group.all_to_all_single(args...); }) {
    return group.all_to_all_single(args...);
  } else {
    return group.alltoall_base(args...);
  }
}

/// PyTorch 2.13 renamed _allgather_base.
template <typename ProcessGroup, typename... Args>
Work start_all_gather(ProcessGroup& group, Args&... args) {
  if constexpr (requires { group.all_gather_single(args...); }) {
    return group.all_gather_single(args...);
  } else {
    return group._allgather_base(args...);
  }
}

/// Messages that bring every other rank's `own`.
Works start_rows(
    const Group& group,
    c10d::ProcessGroup& process_group,
    const at::Tensor& own,
    const std::vector<at::Tensor>& rows) {
  RankTensors out;
  RankTensors in;
  for (int64_t rank = 0; rank < group.ranks(); ++rank) {
    if (rank != group.rank()) {
      out.push_back({rank, rows[rank]});
      in.push_back({rank, own});
    }
  }
  return start_messages(process_group, own, out, in);
}

/// Every rank's `own`, by messages to and from each.
void exchange_rows(
    const Group& group,
    const ProcessGroup& process_group,
    const at::Tensor& own,
    const std::vector<at::Tensor>& rows,
    std::chrono::milliseconds limit,
    Describe describe) {
  const auto start = [&] {
    return start_rows(group, *process_group, own, rows);
  };
  run(group, describe, limit, start, [&] { rows[group.rank()].copy_(own); });
}

[[noreturn]] void raise_no_process_group(const std::string& name) {
  TORCH_CHECK_VALUE(
      false,
      "shardtensor: there is no process group named '",
      name,
      "' on this rank. Was it destroyed, or is the rank not in it?");
}

ProcessGroup find_process_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    raise_no_process_group(name);
  }
}

ProcessGroup alive_group(
    const c10::weak_intrusive_ptr<c10::intrusive_ptr_target>& target,
    const std::string& name) {
  auto alive = target.lock();
  if (!alive) {
    raise_no_process_group(name);
  }
  return ProcessGroup::reclaim(
      static_cast<c10d::ProcessGroup*>(alive.release()));
}

} // namespace

Started::~Started() {
  try {
    wait();
  } catch (const std::exception&) {
    // Something else has failed, or nobody would be here.
  }
}

void Started::wait() {
  if (const auto call = std::exchange(wait_, nullptr)) {
    call();
  }
}

Group::Group(const std::string& name)
    : name_(name), process_group_(find_process_group(name)) {
  const auto process_group = alive_group(process_group_, name_);
  rank_ = process_group->getRank();
  ranks_ = process_group->getSize();
}

bool Group::moves_host_tensors() const {
  const auto devices = alive_group(process_group_, name_)->getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(), [](c10::Device device) {
    return device.is_cpu();
  });
}

c10::Device Group::device_of_numbers() const {
  const auto devices = alive_group(process_group_, name_)->getDeviceTypes();
  // One rank alone may have no backend: it sends nothing.
  return devices.empty() || moves_host_tensors() ? c10::Device(at::kCPU)
                                                 : devices.front();
}

std::string Group::to_string() const {
  return c10::str("rank ", rank_, " of ", ranks_, " in group '", name_, "'");
}

std::string to_string(const Splits& splits) {
  constexpr size_t kShown = 16;
  std::string text = splits.empty() ? "none" : "";
  for (size_t i = 0; i < std::min(splits.size(), kShown); ++i) {
    const auto& [rank, elements] = splits[i];
    text += c10::str(i == 0 ? "" : ", ", "rank ", rank, ": ", elements);
  }
  return splits.size() > kShown ? text + ", ..." : text;
}

std::vector<int64_t> of_every_rank(const Splits& splits, int64_t ranks) {
  std::vector<int64_t> result(ranks, 0);
  for (const auto& [rank, elements] : splits) {
    result.at(rank) = elements;
  }
  return result;
}

void Group::all_to_all(
    const at::Tensor& out,
    const Splits& out_splits,
    const at::Tensor& in,
    const Splits& in_splits,
    Traffic traffic,
    Describe describe,
    c10::function_ref<void()> meanwhile) const {
  auto process_group = alive_group(process_group_, name_);
  const auto limit = limit_for(process_group, in);
  at::Tensor out_bytes = as_bytes(out);
  at::Tensor in_bytes = as_bytes(in);
  const auto size = static_cast<int64_t>(in.element_size());
  const Splits out_lengths = times(out_splits, size);
  const Splits in_lengths = times(in_splits, size);
  const auto start_collective = [&] {
    auto out_of_all = of_every_rank(out_lengths, ranks_);
    auto in_of_all = of_every_rank(in_lengths, ranks_);
    const auto options = bounded<c10d::AllToAllOptions>(limit);
    return start_all_to_all(
        *process_group, out_bytes, in_bytes, out_of_all, in_of_all, options);
  };
  run(
      *this,
      describe,
      limit,
      [&] {
        return prefers_messages(*process_group, in, traffic)
            ? start_messages(
                  *process_group,
                  in,
                  parts(out_bytes, out_lengths),
                  parts(in_bytes, in_lengths))
            : Works{{start_collective()}};
      },
      meanwhile);
}

void Group::all_reduce(const at::Tensor& x, Reduce reduce, Describe describe)
    const {
  auto process_group = alive_group(process_group_, name_);
  const auto limit = limit_for(process_group, x);
  if (prefers_messages_of_all(*process_group, x)) {
    const at::Tensor own = x.view({-1});
    const auto rows = at::empty({ranks_, x.numel()}, x.options()).unbind(0);
    exchange_rows(*this, process_group, own, rows, limit, describe);
    reduce_rows(own, rows, reduce);
    return;
  }
  std::vector<at::Tensor> tensors{x};
  auto options = alone<c10d::AllreduceOptions>(process_group, x, limit);
  options.reduceOp = to_c10d(reduce);
  run(
      *this,
      describe,
      limit,
      [&] { return Works{{process_group->allreduce(tensors, options)}}; },
      [] {});
}

Started Group::start_all_reduce(
    const at::Tensor& x,
    Reduce reduce,
    const std::string& what) const {
  auto process_group = alive_group(process_group_, name_);
  const auto limit = limit_for(process_group, x);
  if (prefers_messages_of_all(*process_group, x)) {
    const at::Tensor own = x.view({-1});
    const auto rows = at::empty({ranks_, x.numel()}, x.options()).unbind(0);
    return run_beside(
        *this,
        what,
        limit,
        [&] { return start_rows(*this, *process_group, own, rows); },
        [=, rank = rank_] {
          rows[rank].copy_(own);
          reduce_rows(own, rows, reduce);
        });
  }
  std::vector<at::Tensor> tensors{x};
  auto options = bounded<c10d::AllreduceOptions>(limit);
  options.reduceOp = to_c10d(reduce);
  return run_beside(
      *this,
      what,
      limit,
      [&] { return Works{{process_group->allreduce(tensors, options)}}; },
      [x] {}); // the backend may not keep it
}

at::Tensor Group::all_gather(const at::Tensor& row, Describe describe) const {
  auto process_group = alive_group(process_group_, name_);
  const auto limit = limit_for(process_group, row);
  at::Tensor all = at::empty({ranks_, row.numel()}, row.options());
  const auto rows = all.unbind(0);
  if (prefers_messages_of_all(*process_group, row)) {
    exchange_rows(*this, process_group, row, rows, limit, describe);
    return all;
  }
  std::vector<at::Tensor> inputs{row};
  std::vector<std::vector<at::Tensor>> outputs{rows};
  const auto options = alone<c10d::AllgatherOptions>(process_group, row, limit);
  run(
      *this,
      describe,
      limit,
      [&] {
        return Works{{process_group->allgather(outputs, inputs, options)}};
      },
      [] {});
  return all;
}

bool Group::gathers_at_once(const at::Tensor& x) const {
  return is_queued(*alive_group(process_group_, name_), x);
}

void Group::all_gather_into(
    const at::Tensor& all,
    const at::Tensor& x,
    Describe describe) const {
  auto process_group = alive_group(process_group_, name_);
  const auto limit = limit_for(process_group, x);
  at::Tensor out = as_bytes(all);
  at::Tensor in = as_bytes(x);
  const auto options = alone<c10d::AllgatherOptions>(process_group, x, limit);
  run(
      *this,
      describe,
      limit,
      [&] {
        return Works{{start_all_gather(*process_group, out, in, options)}};
      },
      [] {});
}

} // namespace shardtensor::detail
