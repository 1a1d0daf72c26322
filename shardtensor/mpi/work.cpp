#include "shardtensor/mpi/work.h"

#include <sched.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <thread>

#include <c10/util/Exception.h>

#include "shardtensor/mpi/session.h"
#include "shardtensor/tensor/streams.h"

namespace shardtensor::detail {

namespace {

constexpr int kEagerPolls = 2000; // before a wait begins to sleep
constexpr std::chrono::microseconds kSleep{50};
constexpr int64_t kLargestMessage = 1 << 30; // MPI counts in int

/// What MPI may still write into when an operation was given up.
void never_free(MpiOperation operation) {
  static std::mutex mutex;
  static auto* abandoned = new std::deque<MpiOperation>();
  const std::lock_guard lock(mutex);
  abandoned->push_back(std::move(operation));
}

// Note [Tags are sizes]
// Where ranks make different calls, their messages differ in size, mostly. A
// longer message than the receiver has room for is an error by the standard,
// but Open MPI 5 writes beyond the end first. Messages of collectives therefore
// carry their size as tag, and one of another size is never taken: the time
// limit then says so. Their tags tell calls apart, too: the second half of one
// starts when somebody waits, on some ranks before the next call, on others
// after it.
int tag_of(int bytes, uint64_t call) {
  constexpr uint64_t kStep = 1327217885; // calls in a row lie far apart
  const auto tags = static_cast<uint64_t>(MpiSession::get().largest_tag());
  return static_cast<int>(
      (static_cast<uint64_t>(bytes) + call % tags * kStep) % tags);
}

/// Calls start(data, bytes) for pieces that an int can count.
template <typename Start>
void for_each_chunk(const at::Tensor& x, Start start) {
  TORCH_INTERNAL_ASSERT(x.is_contiguous());
  auto* data = static_cast<char*>(x.data_ptr());
  const auto total = static_cast<int64_t>(x.nbytes());
  const std::lock_guard lock(MpiSession::get().mutex());
  for (int64_t begin = 0; begin < total; begin += kLargestMessage) {
    const auto bytes = std::min(total - begin, kLargestMessage);
    const int code = start(data + begin, static_cast<int>(bytes));
    if (code != MPI_SUCCESS) {
      MpiSession::get().abandon();
      check_mpi(code, "mpi");
    }
  }
}

/// Which a future wants to know of its tensors.
std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> devices;
  for (const auto& x : tensors) {
    const bool known =
        std::find(devices.begin(), devices.end(), x.device()) != devices.end();
    if (!x.is_cpu() && !known) {
      devices.push_back(x.device());
    }
  }
  return devices;
}

} // namespace

// ---- messages ---------------------------------------------------------------

MpiOperation::MpiOperation(
    c10d::OpType type,
    MPI_Comm comm,
    std::chrono::milliseconds limit,
    uint64_t call)
    : type_(type), comm_(comm), limit_(limit), call_(call) {
  TORCH_CHECK(
      !MpiSession::get().abandoned(),
      "mpi: an earlier operation failed half-way");
}

void MpiOperation::send(const at::Tensor& x, int rank, std::optional<int> tag) {
  for_each_chunk(x, [&](void* data, int bytes) {
    const int number = tag.value_or(tag_of(bytes, call_));
    return MPI_Isend(
        data,
        bytes,
        MPI_BYTE,
        rank,
        number,
        comm_,
        next(x, rank, /*received=*/-1));
  });
}

void MpiOperation::receive(
    const at::Tensor& x,
    int rank,
    std::optional<int> tag) {
  for_each_chunk(x, [&](void* data, int bytes) {
    const int number = tag.value_or(tag_of(bytes, call_));
    return MPI_Irecv(
        data, bytes, MPI_BYTE, rank, number, comm_, next(x, rank, bytes));
  });
}

/// Whose messages have not come, for the error of a passed time limit.
std::string MpiOperation::missing() const {
  std::set<int> ranks;
  const std::lock_guard lock(MpiSession::get().mutex());
  for (size_t i = 0; i < requests_.size(); ++i) {
    int completed = 0;
    MPI_Request_get_status(requests_[i], &completed, MPI_STATUS_IGNORE);
    if (!completed && ranks_[i] >= 0) {
      ranks.insert(ranks_[i]);
    }
  }
  std::string text;
  for (const int rank : ranks) {
    text += c10::str(text.empty() ? ", waiting for rank " : ", rank ", rank);
  }
  return text;
}

/// What has arrived that nobody takes, for the error of a passed time limit.
std::string MpiOperation::strays() const {
  int found = 0;
  int bytes = 0;
  MPI_Status status;
  const std::lock_guard lock(MpiSession::get().mutex());
  MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm_, &found, &status);
  if (!found) {
    return "";
  }
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  return c10::str(
      "; rank ",
      status.MPI_SOURCE,
      " of the group sent ",
      bytes,
      " bytes that this call does not expect");
}

void MpiOperation::barrier() {
  const std::lock_guard lock(MpiSession::get().mutex());
  check_mpi(MPI_Ibarrier(comm_, next({}, -1, /*received=*/-1)), "mpi");
}

MPI_Request* MpiOperation::next(const at::Tensor& x, int rank, int received) {
  tensors_.push_back(x);
  ranks_.push_back(std::max(rank, -1)); // MPI_ANY_SOURCE is negative
  received_.push_back(received);
  return &requests_.emplace_back(MPI_REQUEST_NULL);
}

void MpiOperation::queued_for(const at::Tensor& x) {
  if (!x.is_cpu()) {
    queued_.emplace_back(x.device().type()).record(current_stream(x));
  }
}

// ---- waiting ----------------------------------------------------------------

MpiWork::MpiWork(int rank, MpiOperation operation)
    : Work(rank, operation.type_), operation_(std::move(operation)) {}

MpiWork::~MpiWork() {
  if (!done_ && !operation_.requests_.empty()) {
    never_free(std::move(operation_));
  }
}

/// Goes as far as it can without waiting. Raises what MPI reports.
bool MpiWork::test() {
  while (!done_ && !exception_ && test_messages()) {
    if (operation_.steps_.empty()) {
      done_ = true;
      finish();
    } else {
      const auto step = std::move(operation_.steps_.front());
      operation_.steps_.pop_front();
      step(operation_);
    }
  }
  return done_ || exception_;
}

/// Whether all messages so far have arrived; forgets them then.
bool MpiWork::test_messages() {
  auto& requests = operation_.requests_;
  int completed = 0;
  std::vector<MPI_Status> statuses(requests.size());
  int code = MPI_SUCCESS;
  {
    const std::lock_guard lock(MpiSession::get().mutex());
    code = MPI_Testall(
        static_cast<int>(requests.size()),
        requests.data(),
        &completed,
        statuses.data());
  }
  if (code == MPI_ERR_IN_STATUS) {
    for (const auto& status : statuses) {
      if (status.MPI_ERROR != MPI_SUCCESS &&
          status.MPI_ERROR != MPI_ERR_PENDING) {
        fail(mpi_error_text(status.MPI_ERROR));
      }
    }
  }
  if (code != MPI_SUCCESS) {
    fail(mpi_error_text(code));
  }
  if (!completed) {
    return false;
  }
  check_sizes(statuses);
  source_ = statuses.size() == 1 ? statuses[0].MPI_SOURCE : source_;
  requests.clear();
  operation_.received_.clear();
  operation_.ranks_.clear();
  operation_.tensors_.clear();
  return true;
}

/// MPI itself takes a shorter message for a good one.
void MpiWork::check_sizes(const std::vector<MPI_Status>& statuses) {
  for (size_t i = 0; i < statuses.size(); ++i) {
    const int expected = operation_.received_[i];
    int arrived = expected;
    if (expected >= 0) {
      MPI_Get_count(&statuses[i], MPI_BYTE, &arrived);
    }
    if (arrived != expected) {
      fail(
          c10::str(
              "rank ",
              statuses[i].MPI_SOURCE,
              " of the group sent ",
              arrived,
              " bytes, expected ",
              expected));
    }
  }
}

void MpiWork::fail(const std::string& cause) {
  MpiSession::get().abandon();
  const auto error = std::make_exception_ptr(
      C10_BUILD_ERROR(DistBackendError, "mpi: " + cause));
  never_free(std::move(operation_));
  operation_.requests_.clear();
  finish(error);
  std::rethrow_exception(error);
}

bool MpiWork::isCompleted() {
  try {
    return test();
  } catch (const c10::DistBackendError&) {
    return true; // exception() says why
  }
}

bool MpiWork::isSuccess() const {
  return done_;
}

bool MpiWork::wait(std::chrono::milliseconds limit) {
  if (limit <= kNoTimeout || limit > operation_.limit_) {
    limit = operation_.limit_;
  }
  const auto begin = Clock::now(); // before it nothing had made progress
  for (int polls = 0; !test(); ++polls) {
    if (Clock::now() - begin > limit) {
      fail(
          c10::str(
              "not finished after ",
              limit.count(),
              " ms",
              operation_.missing(),
              operation_.strays()));
    }
    if (polls < kEagerPolls) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(kSleep);
    }
  }
  if (exception_) {
    std::rethrow_exception(exception_);
  }
  for (const auto& queued : operation_.queued_) {
    queued.block(current_stream(queued.device()));
  }
  return true;
}

void MpiWork::synchronize() {
  wait();
}

int MpiWork::sourceRank() const {
  return source_;
}

std::vector<at::Tensor> MpiWork::result() {
  return operation_.results_;
}

c10::intrusive_ptr<c10::ivalue::Future> MpiWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), devices_of(result()));
  try {
    wait();
    future->markCompleted(result());
  } catch (const c10::DistBackendError&) {
    future->setError(std::current_exception());
  }
  return future;
}

} // namespace shardtensor::detail
