// Things that go wrong between ranks, one per run: `failures dies`. Each rank
// that gets an error says so: "rank 0 got: ..." and leaves.
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <thread>

#include <ATen/ATen.h>

#include "shardtensor/shardtensor.h"

using namespace shardtensor;

namespace {

void sum(int64_t elements) {
  const CommScope scope("the test's sum");
  all_reduce(
      at::ones({elements}), Reduce::Sum, DistributedManager::get().group());
}

void move() {
  const auto& mesh = DistributedManager::get().global_mesh();
  const auto rows = make_spec(mesh, {6, 6}, {Placement::shard(0)});
  const auto local = at::ones(rows->local_sizes());
  redistribute(from_local(local, rows), {Placement::shard(1)});
}

void go_wrong(const std::string& how, int64_t rank) {
  sum(1); // all is well
  if (how == "dies" && rank == 1) {
    _exit(7);
  } else if (how == "sleeps" && rank == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(60));
  } else if (how == "differs" && rank == 1) {
    move();
  } else if (how == "brings_another_size" && rank == 1) {
    sum(1 << 20);
  } else {
    sum(3);
  }
}

} // namespace

int main(int, char** arguments) {
  DistributedManager::initialize();
  auto& manager = DistributedManager::get();
  manager.initialize_mesh({-1}, {"domain"});
  try {
    go_wrong(arguments[1], manager.rank());
  } catch (const c10::DistBackendError& error) {
    const std::string text = error.what();
    std::cerr << "rank " + std::to_string(manager.rank()) +
            " got: " + text.substr(0, text.find('\n')) + "\n";
    // The launcher ends the others when the first one leaves.
    std::this_thread::sleep_for(std::chrono::seconds(2));
    std::_Exit(1);
  }
}
