#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include <mpi.h>

namespace shardtensor::detail {

/// MPI, started by the first use and ended when the program exits with 0.
/// Another part of the program may have started it; then it also ends it.
/// Raises when MPI does not let several threads take turns.
class MpiSession {
 public:
  static MpiSession& get();

  int rank() const {
    return rank_;
  }
  int ranks() const {
    return ranks_;
  }

  int largest_tag() const {
    return largest_tag_;
  }

  /// Held around every MPI call; none of ours blocks.
  std::mutex& mutex() {
    return mutex_;
  }

  /// Something failed half-way: ending MPI would wait for it for ever, so that
  /// the program exits without.
  void abandon() {
    abandoned_ = true;
  }
  bool abandoned() const {
    return abandoned_;
  }

 private:
  MpiSession();
  static void finish(int status);

  std::mutex mutex_;
  int rank_ = 0;
  int ranks_ = 1;
  int largest_tag_ = 32767; // what every MPI has
  std::atomic<bool> abandoned_{false};
};

/// Raises c10::DistBackendError with MPI's own words unless `code` is success.
void check_mpi(int code, const std::string& call);

/// What MPI says about an error.
std::string mpi_error_text(int code);

} // namespace shardtensor::detail
