#include <iostream>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>

int main() {
  using namespace shardtensor;
  DistributedManager::initialize(); // from mpirun, SLURM or torchrun
  auto& manager = DistributedManager::get();
  const auto mesh = manager.initialize_mesh({-1}, {"domain"});

  const auto rows = make_spec(mesh, {1, 3, 721, 1440}, {Placement::shard(2)});
  const auto whole = at::ones({1, 3, 721, 1440}); // of rank 0
  const auto weather = scatter(whole, /*source=*/0, rows).requires_grad_();
  const auto y =
      at::conv2d(weather, at::ones({8, 3, 3, 3}), {}, {2, 2}, {1, 1});
  y.mean().backward();

  if (manager.rank() == 0) {
    std::cout << "shardtensor " << SHARDTENSOR_VERSION << ": " << *spec(y)
              << ", gradient " << spec(weather.grad())->placement(0) << '\n';
  }
  DistributedManager::cleanup(/*wait=*/true);
}
