#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/core/Stream.h>

#include "memory.h"

// Streams of the guarded device. A kernel is put into the queue of the current
// stream and runs only when the host waits for it, or for a kernel behind it:
// at an event, a stream's end, or a copy to the host. Until then its results
// are what their memory held, poison, for the host and for every other stream
// that did not wait. What runs is what was waited for, and nothing else.
//
// Thread safety: all of it may be called from any thread.

namespace guarded {

/// Held by what changes queues or memory, and while kernels run.
std::recursive_mutex& device_mutex();

/// Of this thread.
c10::StreamId& current_stream();

/// For each stream how many of its kernels come before something.
using Before = std::unordered_map<c10::StreamId, uint64_t>;

/// A point in a stream's queue.
struct Point {
  c10::StreamId stream = 0;
  Before before; // those of the stream itself, and of others by its waits
};

/// Puts `run` into the current stream's queue; it has `uses` open and this
/// call's thread-local state. What it raises is raised where the host waits.
void launch(std::vector<Use> uses, std::function<void()> run);

/// The same at once: the host waits for the current stream first.
void run_now(const std::vector<Use>& uses, const std::function<void()>& run);

/// The end of a stream's queue as it is now.
Point end_of(c10::StreamId stream);

/// What `stream` is given from now on runs after `point`.
void wait(c10::StreamId stream, const Point& point);

/// The host waits.
void finish(const Point& point);
void finish_all();

/// How many kernels the stream was given.
uint64_t launched(c10::StreamId stream);
/// The first `kernels` of them have run.
bool has_run(c10::StreamId stream, uint64_t kernels);

/// Kernels of other streams that would read the freed block after its stream's
/// next tensor, now, has it: see Note [Memory of a stream].
void spoil_late_readers(const Block& block);

} // namespace guarded
