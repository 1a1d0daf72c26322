// Trains the vision transformer of `make demo-attention` in C++: next month's
// sea-surface temperature, the oceans sharded by latitude over all ranks.
//
//     python examples/cpp/prepare_ocean.py out/ocean  # fields, first weights
//     mpirun -n 2 build/examples/train_ocean_vit out/ocean --steps 80
//
// From the same weights the losses are those of Python's demo, and so is the
// error of months that were held out. --mesh 2x2 cuts longitude, too; --window
// 5x13 has a patch attend to its neighbourhood. The model (ocean_vit.h) does
// not know that its fields are sharded.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <shardtensor/shardtensor.h>
#include <torch/optim/adamw.h>

#include "ocean_vit.h"
#include "tensor_file.h"
#include "training.h"

using at::Tensor;
using shardtensor::DistributedManager;
using shardtensor::MeshPtr;
using shardtensor::Partition;
using shardtensor::Placement;

namespace {

constexpr double kLearningRate = 2e-3; // at its peak
constexpr int64_t kUnseen = 12; // the last months, which nobody learns from
constexpr double kDeviation = 2.5; // kelvin

struct Arguments {
  std::string folder;
  std::vector<int64_t> mesh{-1};
  std::vector<int64_t> window;
  int64_t steps = 80;
  int64_t batch = 4;
  int64_t heads = 4;
};

Arguments parse(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string value = values[i];
    const bool more = i + 1 < count;
    if (value == "--steps" && more) {
      arguments.steps = std::atoll(values[++i]);
    } else if (value == "--batch" && more) {
      arguments.batch = std::atoll(values[++i]);
    } else if (value == "--heads" && more) {
      arguments.heads = std::atoll(values[++i]);
    } else if (value == "--mesh" && more) {
      arguments.mesh = numbers("--mesh", values[++i]);
    } else if (value == "--window" && more) {
      arguments.window = numbers("--window", values[++i]);
    } else {
      arguments.folder = value;
    }
  }
  TORCH_CHECK(
      !arguments.folder.empty(),
      "usage: train_ocean_vit FOLDER [--steps N] [--batch N] [--heads N] "
      "[--mesh 2x2] [--window 5x13]; prepare_ocean.py fills the folder");
  return arguments;
}

/// A model of the shape that the weights have.
OceanViT load_model(const Arguments& arguments) {
  const auto weights = read_tensors(arguments.folder + "/weights.bin");
  const auto& embed = weights.at("embed.weight");
  OceanViTOptions options;
  options.width = embed.size(0);
  options.channels = embed.size(1);
  options.patch = embed.sizes().slice(2).vec();
  options.heads = arguments.heads;
  options.window = arguments.window;
  while (weights.count(c10::str("blocks.", options.depth, ".qkv.weight"))) {
    ++options.depth;
  }
  OceanViT model(options);
  load_weights(*model, weights);
  return model;
}

/// Pieces of whole patches, as even as can be.
Partition whole_patches(int64_t extent, int64_t patch, int64_t ranks) {
  std::vector<int64_t> sizes;
  const auto patches = extent / patch;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    sizes.push_back((patches / ranks + (rank < patches % ranks)) * patch);
  }
  return Partition(sizes);
}

/// The fields of rank 0 (their sizes are those of every rank's file), cut over
/// the mesh from latitude on. No patch is cut: any cut is right, but would send
/// its part of every field to its patch.
Tensor shard(
    const Tensor& fields,
    const MeshPtr& mesh,
    const std::vector<int64_t>& patch) {
  std::vector<Placement> placements;
  shardtensor::ShardSpec::Partitions partitions(fields.dim());
  for (int64_t axis = 0; axis < mesh->axes(); ++axis) {
    const auto dim = 2 + axis;
    placements.push_back(Placement::shard(dim));
    partitions[dim] =
        whole_patches(fields.size(dim), patch.at(axis), mesh->ranks(axis));
  }
  const auto layout = shardtensor::make_spec(
      mesh, fields.sizes().vec(), placements, partitions);
  return shardtensor::scatter(fields, /*source=*/0, layout);
}

Tensor months(const Tensor& fields, const Tensor& numbers, int64_t later = 0) {
  std::vector<Tensor> chosen;
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    chosen.push_back(fields.narrow(0, numbers[i].item<int64_t>() + later, 1));
  }
  return at::cat(chosen);
}

/// The mean square over the sea, of deviations; `truth` is a month's fields.
Tensor error(const Tensor& prediction, const Tensor& truth) {
  const auto sea = truth.narrow(1, 1, 1);
  const auto difference = (prediction - truth.narrow(1, 0, 1)) * sea;
  return difference.square().sum() / sea.sum();
}

/// In kelvin, the mean over the months that were held out, each predicted from
/// the true month before.
double error_of_unseen(OceanViT& model, const Tensor& fields) {
  const torch::NoGradGuard no_grad;
  double sum = 0;
  for (auto month = fields.size(0) - kUnseen; month < fields.size(0); ++month) {
    const auto prediction = model->forward(fields.narrow(0, month - 1, 1));
    const auto square = error(prediction, fields.narrow(0, month, 1));
    sum += std::sqrt(shardtensor::full_tensor(square).item<double>());
  }
  return sum / kUnseen * kDeviation;
}

void run(const Arguments& arguments) {
  const auto mesh = make_mesh(arguments.mesh);
  const auto device = DistributedManager::get().device();
  auto model = load_model(arguments);
  model->to(device);
  const auto saved = read_tensors(arguments.folder + "/ocean.bin");
  const auto fields =
      shard(saved.at("fields").to(device), mesh, model->patch());
  const bool speaks = mesh->position() == 0;
  if (speaks) {
    std::cout << *shardtensor::spec(fields) << std::endl;
  }
  // torch.Generator().manual_seed(0): Python's months.
  const auto order = at::make_generator<at::CPUGeneratorImpl>(/*seed=*/0);
  const auto learnt = fields.size(0) - kUnseen - 1;
  const auto options =
      torch::optim::AdamWOptions(kLearningRate).weight_decay(0.05);
  train(model->parameters(), options, arguments.steps, speaks, [&](int64_t) {
    const auto now = at::randint(
        learnt, {arguments.batch}, order, at::TensorOptions(at::kLong));
    return error(model->forward(months(fields, now)), months(fields, now, 1));
  });
  const double kelvin = error_of_unseen(model, fields);
  if (speaks) {
    std::printf("error of months never learnt from: %.3f K\n", kelvin);
  }
}

} // namespace

int main(int count, char** values) {
  const auto arguments = parse(count, values);
  DistributedManager::initialize();
  run(arguments);
  DistributedManager::cleanup(/*wait=*/true);
}
