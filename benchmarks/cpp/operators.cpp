// What one operator costs from C++: on 64 numbers per rank, plain and sharded.
//
//     mpirun -n 2 operators [rounds]
//
// Prints a table in Markdown. The two variants take turns; a round's time is
// that of the slowest rank, times are medians, the ratio is the median of the
// rounds' ratios. Mirrors benchmarks/python/operators.py.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <shardtensor/shardtensor.h>

using shardtensor::DistributedManager;
using shardtensor::Placement;

namespace {

constexpr double kBlock = 0.02; // seconds that one variant runs in a turn

/// What the operators take: x and y sharded or plain, the weights plain.
struct Inputs {
  at::Tensor x, y;
  at::Tensor weight, bias;
};

struct Operator {
  const char* name;
  at::Tensor (*call)(const Inputs&);
  bool grad = false;
};

const std::vector<Operator> kOperators{
    {"add", [](const Inputs& in) { return at::add(in.x, in.y); }},
    {"mul, recording grad",
     [](const Inputs& in) { return at::mul(in.x, in.y); },
     true},
    {"view", [](const Inputs& in) { return in.x.view({in.x.size(0), 2, 4}); }},
    {"sum", [](const Inputs& in) { return at::sum(in.x); }},
    {"relu", [](const Inputs& in) { return at::relu(in.x); }},
    {"linear",
     [](const Inputs& in) { return at::linear(in.x, in.weight, in.bias); }},
    {"cat", [](const Inputs& in) { return at::cat({in.x, in.y}, 1); }},
};

Inputs plain_inputs(bool grad) {
  const auto leaf = [&] { return at::randn({8, 8}).requires_grad_(grad); };
  return {leaf(), leaf(), at::randn({8, 8}), at::randn({8})};
}

Inputs sharded(const Inputs& plain, const shardtensor::MeshPtr& mesh) {
  const auto layout = shardtensor::make_spec(
      mesh, {8 * mesh->ranks(), 8}, {Placement::shard(0)});
  const auto leaf = [&](const at::Tensor& piece) {
    return shardtensor::from_local(piece.detach(), layout)
        .requires_grad_(piece.requires_grad());
  };
  return {leaf(plain.x), leaf(plain.y), plain.weight, plain.bias};
}

// ---- timing -----------------------------------------------------------------

using Times = std::vector<double>; // seconds per call, of each round

double seconds_per_call(const Operator& op, const Inputs& inputs, int calls) {
  DistributedManager::get().barrier();
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    op.call(inputs);
  }
  const std::chrono::duration<double> passed =
      std::chrono::steady_clock::now() - begin;
  return passed.count() / calls;
}

Times slowest_rank(const Times& times) {
  const auto slowest = shardtensor::all_reduce(
      at::tensor(times, at::kDouble),
      shardtensor::Reduce::Max,
      DistributedManager::get().group());
  const auto* data = slowest.const_data_ptr<double>();
  return {data, data + slowest.numel()};
}

/// The same on all ranks; warms up, too.
int calls_per_block(const Operator& op, const Inputs& inputs) {
  seconds_per_call(op, inputs, 100);
  const auto seconds =
      slowest_rank({seconds_per_call(op, inputs, 100)}).front();
  return std::max(1, static_cast<int>(kBlock / seconds));
}

double median(Times times) {
  const auto middle = times.begin() + times.size() / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

// ---- the table --------------------------------------------------------------

void print_row(const char* name, const Times& plain, const Times& sharded) {
  Times ratios;
  for (size_t round = 0; round < plain.size(); ++round) {
    ratios.push_back(sharded[round] / plain[round]);
  }
  std::printf(
      "| %s | %.2f µs | %.2f µs | %.2f |\n",
      name,
      median(plain) * 1e6,
      median(sharded) * 1e6,
      median(ratios));
}

void measure(const Operator& op, const shardtensor::MeshPtr& mesh, int rounds) {
  const auto plain = plain_inputs(op.grad);
  const auto wrapped = sharded(plain, mesh);
  const auto plain_calls = calls_per_block(op, plain);
  const auto wrapped_calls = calls_per_block(op, wrapped);
  Times plain_times, wrapped_times;
  for (int round = 0; round < rounds; ++round) {
    plain_times.push_back(seconds_per_call(op, plain, plain_calls));
    wrapped_times.push_back(seconds_per_call(op, wrapped, wrapped_calls));
  }
  plain_times = slowest_rank(plain_times);
  wrapped_times = slowest_rank(wrapped_times);
  if (DistributedManager::get().rank() == 0) {
    print_row(op.name, plain_times, wrapped_times);
  }
}

} // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? std::max(1, std::atoi(arguments[1])) : 15;
  at::set_num_threads(1);
  DistributedManager::initialize();
  auto& manager = DistributedManager::get();
  const auto mesh = manager.initialize_mesh({-1}, {"domain"});
  if (manager.rank() == 0) {
    std::printf(
        "### One operator on 64 numbers per rank, from C++\n\n"
        "|  | plain | ShardTensor | ShardTensor / plain |\n"
        "| --- | --- | --- | --- |\n");
  }
  for (const auto& op : kOperators) {
    measure(op, mesh, rounds);
  }
  DistributedManager::cleanup(/*wait=*/true);
}
