#include "shardtensor/mpi/session.h"

#include <c10/util/Exception.h>

namespace shardtensor::detail {

MpiSession& MpiSession::get() {
  static auto* session = new MpiSession(); // outlives all groups
  return *session;
}

MpiSession::MpiSession() {
  int started = 0;
  int provided = 0;
  MPI_Initialized(&started);
  if (started) {
    check_mpi(MPI_Query_thread(&provided), "MPI_Query_thread");
  } else {
    check_mpi(
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided),
        "MPI_Init_thread");
    on_exit([](int status, void*) { finish(status); }, nullptr);
  }
  TORCH_CHECK(
      provided >= MPI_THREAD_SERIALIZED,
      "shardtensor: MPI was started with thread level ",
      provided,
      ", expected MPI_THREAD_SERIALIZED or more: call MPI_Init_thread");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &ranks_), "MPI_Comm_size");
  int* largest_tag = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest_tag, &found);
  if (found) {
    largest_tag_ = *largest_tag;
  }
}

// Note [A rank that fails must not wait]
// MPI_Finalize waits for all ranks, and they may wait for a message of this
// one. A process that ends without it, and not with 0, lets mpirun end the
// others.
void MpiSession::finish(int status) {
  int finished = 0;
  MPI_Finalized(&finished);
  if (!finished && status == 0 && !get().abandoned_) {
    MPI_Finalize();
  }
}

std::string mpi_error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {text, static_cast<size_t>(length)};
}

void check_mpi(int code, const std::string& call) {
  if (code != MPI_SUCCESS) {
    C10_THROW_ERROR(DistBackendError, call + ": " + mpi_error_text(code));
  }
}

} // namespace shardtensor::detail
