#include "queue.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

namespace guarded {
namespace {

/// A kernel, or a wait for kernels of another stream.
struct Item {
  std::vector<Use> uses;
  std::function<void()> run;
  std::pair<c10::StreamId, uint64_t> awaited{0, 0};
};

struct Queue {
  std::deque<Item> items; // those that have not run
  uint64_t launched = 0;
  Before before; // of other streams, by waits

  uint64_t run() const {
    return launched - items.size();
  }
};

Queue& queue_of(c10::StreamId stream) {
  static auto* queues = new std::unordered_map<c10::StreamId, Queue>();
  return (*queues)[stream];
}

std::vector<c10::StreamId>& streams() {
  static auto* known = new std::vector<c10::StreamId>();
  return *known;
}

std::exception_ptr& failure() {
  static auto* first = new std::exception_ptr();
  return *first;
}

class Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {} // the trial has said it
};

/// Dispatch and autograd as they were where a kernel was launched.
class StateOfCaller {
 public:
  StateOfCaller()
      : keys_(c10::impl::tls_local_dispatch_key_set()),
        inference_(c10::AutogradState::get_tls_state().get_inference_mode()) {
    // Of a mode that a compiler has left by then.
    keys_.included_ = keys_.included_ -
        c10::DispatchKeySet(
                          {c10::DispatchKey::Python,
                           c10::DispatchKey::PythonTLSSnapshot,
                           c10::DispatchKey::PythonDispatcher});
  }

  void call(const std::function<void()>& run) const {
    static Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard silence(&quiet);
    const c10::impl::ForceDispatchKeyGuard keys(keys_);
    const at::NoGradGuard no_grad;
    const Inference inference(inference_);
    run();
  }

 private:
  /// InferenceMode would change the keys, too.
  struct Inference {
    explicit Inference(bool on) : before(flags().get_inference_mode()) {
      flags().set_inference_mode(on);
    }
    ~Inference() {
      flags().set_inference_mode(before);
    }
    static c10::AutogradState& flags() {
      return c10::AutogradState::get_tls_state();
    }
    bool before;
  };

  c10::impl::LocalDispatchKeySet keys_;
  bool inference_;
};

void put(c10::StreamId stream, Item item) {
  auto& queue = queue_of(stream);
  if (queue.launched++ == 0) {
    streams().push_back(stream);
  }
  queue.items.push_back(std::move(item));
}

/// Runs the stream's first `kernels`, and what they wait for.
void run_first(c10::StreamId stream, uint64_t kernels) {
  while (!has_run(stream, kernels)) {
    Item item = std::move(queue_of(stream).items.front());
    if (item.run) {
      try {
        const Open open(item.uses);
        item.run();
      } catch (...) {
        failure() = failure() ? failure() : std::current_exception();
      }
    } else {
      run_first(item.awaited.first, item.awaited.second);
    }
    queue_of(stream).items.pop_front();
  }
}

void raise_failure() {
  if (failure()) {
    std::rethrow_exception(std::exchange(failure(), nullptr));
  }
}

} // namespace

std::recursive_mutex& device_mutex() {
  static auto* mutex = new std::recursive_mutex();
  return *mutex;
}

c10::StreamId& current_stream() {
  thread_local c10::StreamId stream = 0;
  return stream;
}

void launch(std::vector<Use> uses, std::function<void()> run) {
  ++counts().kernels;
  const std::lock_guard lock(device_mutex());
  const StateOfCaller state;
  put(current_stream(),
      {std::move(uses), [state, run = std::move(run)] { state.call(run); }});
}

void run_now(const std::vector<Use>& uses, const std::function<void()>& run) {
  const std::lock_guard lock(device_mutex());
  finish(end_of(current_stream()));
  const Open open(uses);
  run();
}

Point end_of(c10::StreamId stream) {
  const std::lock_guard lock(device_mutex());
  const auto& queue = queue_of(stream);
  Point point{stream, queue.before};
  point.before[stream] = queue.launched;
  return point;
}

void wait(c10::StreamId stream, const Point& point) {
  const std::lock_guard lock(device_mutex());
  for (const auto& [other, kernels] : point.before) {
    if (other == stream) {
      continue;
    }
    auto& known = queue_of(stream).before[other];
    known = std::max(known, kernels);
  }
  if (point.stream != stream) {
    put(stream, {{}, nullptr, {point.stream, point.before.at(point.stream)}});
  }
}

void finish(const Point& point) {
  const std::lock_guard lock(device_mutex());
  run_first(point.stream, point.before.at(point.stream));
  raise_failure();
}

void finish_all() {
  const std::lock_guard lock(device_mutex());
  for (const auto stream : streams()) {
    run_first(stream, launched(stream));
  }
  raise_failure();
}

uint64_t launched(c10::StreamId stream) {
  return queue_of(stream).launched;
}

bool has_run(c10::StreamId stream, uint64_t kernels) {
  return queue_of(stream).run() >= kernels;
}

void spoil_late_readers(const Block& block) {
  const auto& told = block.readers;
  for (const auto stream : streams()) {
    if (stream == block.stream ||
        std::any_of(told.begin(), told.end(), [=](const auto& reader) {
          return reader.first == stream;
        })) {
      continue;
    }
    auto& queue = queue_of(stream);
    auto kernel = queue.run();
    for (auto& item : queue.items) {
      ++kernel;
      if (kernel <= queue_of(block.stream).before[stream]) {
        continue; // it is waited for
      }
      for (auto& use : item.uses) {
        use.freed_too_early = use.freed_too_early ||
            (use.block == &block && use.owner == block.owner);
      }
    }
  }
}

} // namespace guarded
