// Trains the 3-D UNet of `make demo` in C++, the volume sharded over all ranks.
//
//     python examples/cpp/prepare.py out/unet       # volume and first weights
//     mpirun -n 2 build/examples/train_unet out/unet --steps 40
//
// From the same weights the losses are those of Python's demo, and so is the
// Dice, which is that of slices whose labels were held out. --mesh 2x2 cuts
// two dims. The model (unet.h) does not know that the volume is sharded.

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>
#include <torch/optim/adamw.h>

#include "tensor_file.h"
#include "training.h"
#include "unet.h"

using shardtensor::DistributedManager;
using shardtensor::MeshPtr;
using shardtensor::Placement;

namespace {

constexpr int64_t kClasses = 3;
constexpr double kLearningRate = 4e-2; // at its peak

struct Arguments {
  std::string folder;
  std::vector<int64_t> mesh{-1};
  int64_t steps = 40;
};

Arguments parse(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string value = values[i];
    const bool more = i + 1 < count;
    if (value == "--steps" && more) {
      arguments.steps = std::atoll(values[++i]);
    } else if (value == "--mesh" && more) {
      arguments.mesh = numbers("--mesh", values[++i]);
    } else {
      arguments.folder = value;
    }
  }
  TORCH_CHECK(
      !arguments.folder.empty(),
      "usage: train_unet FOLDER [--steps N] [--mesh 2x2]; prepare.py fills the "
      "folder");
  return arguments;
}

/// The tensor of rank 0, cut over the mesh from `first_dim` on. Its sizes are
/// those of every rank's file.
at::Tensor shard(const at::Tensor& x, const MeshPtr& mesh, int64_t first_dim) {
  std::vector<Placement> placements;
  for (int64_t axis = 0; axis < mesh->axes(); ++axis) {
    placements.push_back(Placement::shard(first_dim + axis));
  }
  const auto layout =
      shardtensor::make_spec(mesh, x.sizes().vec(), std::move(placements));
  return shardtensor::scatter(x, /*source=*/0, layout);
}

/// A model of the shape that the weights have.
UNet load_model(const std::string& path) {
  const auto weights = read_tensors(path);
  std::vector<int64_t> channels{weights.at("first.0.weight").size(0)};
  while (weights.count(c10::str("downs.", channels.size() - 1, ".weight"))) {
    channels.push_back(2 * channels.back());
  }
  UNet model(channels, kClasses);
  load_weights(*model, weights);
  return model;
}

/// Of each class, on the slices that `labels` leaves out.
at::Tensor dice_on_unseen(
    UNet& model,
    const at::Tensor& volume,
    const at::Tensor& labels,
    const at::Tensor& truth) {
  const torch::NoGradGuard no_grad;
  const auto prediction =
      shardtensor::full_tensor(model->forward(volume).argmax(1)).cpu();
  const auto certain = at::one_hot(prediction, kClasses).movedim(-1, 1);
  return dice(certain, truth.masked_fill(labels >= 0, -100));
}

void run(const Arguments& arguments) {
  const auto mesh = make_mesh(arguments.mesh);
  const auto device = DistributedManager::get().device();
  auto brain = read_tensors(arguments.folder + "/brain.bin");
  const auto volume = shard(brain.at("volume").to(device), mesh, 2);
  const auto labels = shard(brain.at("labels").to(device), mesh, 1);
  auto model = load_model(arguments.folder + "/weights.bin");
  model->to(device);
  const bool speaks = mesh->position() == 0;
  if (speaks) {
    std::cout << *shardtensor::spec(volume) << std::endl;
  }
  const torch::optim::AdamWOptions options(kLearningRate);
  train(model->parameters(), options, arguments.steps, speaks, [&](int64_t) {
    return segmentation_loss(model->forward(volume), labels);
  });
  const auto scores =
      dice_on_unseen(model, volume, brain.at("labels"), brain.at("truth"));
  if (speaks) {
    std::printf(
        "Dice on slices never learnt from: other %.3f, grey matter %.3f, "
        "white matter %.3f\n",
        scores[0].item<double>(),
        scores[1].item<double>(),
        scores[2].item<double>());
  }
}

} // namespace

int main(int count, char** values) {
  const auto arguments = parse(count, values);
  DistributedManager::initialize();
  run(arguments);
  DistributedManager::cleanup(/*wait=*/true);
}
