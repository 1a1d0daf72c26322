// An operator of your own: at::dot replaced on ShardTensors by a function.
//
//     mpirun -n 2 dot_product
//
// Output, on any number of ranks:
//
//     The rule served at::dot: true
//     Result and placements: 332833500, Replicate()
//     Gradients equal the other vector: true

#include <iostream>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>
#include <torch/library.h>

using shardtensor::DistributedManager;
using shardtensor::Placement;

namespace {

int served = 0;

/// Each rank multiplies what it holds: a term of the sum over the ranks, which
/// every rank then gets. Backward follows from the parts.
at::Tensor sharded_dot(const at::Tensor& x, const at::Tensor& y) {
  ++served;
  const auto local =
      at::dot(shardtensor::to_local(x), shardtensor::to_local(y));
  const auto terms = shardtensor::make_spec(
      shardtensor::spec(x)->mesh(), {}, {Placement::partial()});
  return shardtensor::redistribute(
      shardtensor::from_local(local, terms), {Placement::replicate()});
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("dot", sharded_dot);
}

} // namespace

int main() {
  DistributedManager::initialize();
  auto& manager = DistributedManager::get();
  const auto mesh = manager.initialize_mesh({-1}, {"domain"});

  const auto count = at::arange(1000, at::kDouble);
  const auto layout =
      shardtensor::make_spec(mesh, {1000}, {Placement::shard(0)});
  const auto x = shardtensor::scatter(count, 0, layout).requires_grad_();
  const auto y = shardtensor::scatter(count, 0, layout).requires_grad_();
  const auto result = at::dot(x, y);
  result.backward();

  const bool same = shardtensor::full_tensor(x.grad()).equal(count) &&
      shardtensor::full_tensor(y.grad()).equal(count);
  const auto value = shardtensor::full_tensor(result).item<int64_t>();
  if (manager.rank() == 0) {
    std::cout << std::boolalpha //
              << "The rule served at::dot: " << (served == 1) << '\n'
              << "Result and placements: " << value << ", "
              << shardtensor::spec(result)->placement(0) << '\n'
              << "Gradients equal the other vector: " << same << '\n';
  }
  DistributedManager::cleanup(/*wait=*/true);
}
