// A convolution over a sharded image, checked against one device.
//
//     mpirun -n 4 sharded_conv
//
// Output on 4 ranks:
//
// clang-format off
//     Output placements and local shape: Shard(dim=2), [1, 8, 256, 1024]
//     Output, image gradient and weight gradient equal those of one device: true
//     Distributed grad sharding and local shape: Shard(dim=2), [1, 8, 256, 1024]
// clang-format on

#include <iostream>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>
#include <torch/nn/modules/conv.h>

using shardtensor::DistributedManager;
using shardtensor::Placement;

int main() {
  DistributedManager::initialize();
  auto& manager = DistributedManager::get();
  const auto mesh = manager.initialize_mesh({-1}, {"domain"});

  at::manual_seed(0); // the same weights and the same image on every rank
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(8, 8, 3).padding(1));
  const auto image = at::randn({1, 8, 1024, 1024});

  const auto layout =
      shardtensor::make_spec(mesh, image.sizes().vec(), {Placement::shard(2)});
  const auto sharded =
      shardtensor::scatter(image, /*source=*/0, layout).requires_grad_();
  const auto output = conv(sharded);
  output.mean().backward();
  const auto weight_gradient = conv->weight.grad();

  image.requires_grad_();
  conv->zero_grad();
  const auto expected = conv(image);
  expected.mean().backward();

  const bool same =
      shardtensor::full_tensor(output).allclose(expected, 1e-5, 1e-6) &&
      shardtensor::full_tensor(sharded.grad()).allclose(image.grad()) &&
      weight_gradient.allclose(conv->weight.grad(), 1e-5, 1e-6);
  if (manager.rank() == 0) {
    const auto say = [](const char* what, const at::Tensor& x) {
      std::cout << what << ": " << shardtensor::spec(x)->placement(0) << ", "
                << shardtensor::to_local(x).sizes() << '\n';
    };
    say("Output placements and local shape", output);
    std::cout << "Output, image gradient and weight gradient equal those of "
              << "one device: " << std::boolalpha << same << '\n';
    say("Distributed grad sharding and local shape", sharded.grad());
  }
  DistributedManager::cleanup(/*wait=*/true);
}
