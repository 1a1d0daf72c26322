// Trains the 3-D UNet of `make demo` in C++, the volume sharded over all ranks:
// `make demo-cpp`, or by hand
//
//     python examples/cpp/prepare.py out/unet       # volume and first weights
//     mpirun -n 1 build/examples/train_unet out/unet
//     mpirun -n 2 build/examples/train_unet out/unet
//     python examples/cpp/show.py out/unet          # tables and pictures
//
// From the same weights the losses are those of Python's demo, and so is the
// Dice, which is that of slices whose labels were held out. --mesh 2x2 cuts
// two dims. The model (unet.h) does not know that the volume is sharded.

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iostream>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>
#include <torch/optim/adamw.h>

#include "peak_memory.h"
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

/// What show.py shows of each step.
at::Tensor rows(const std::vector<Step>& steps) {
  std::vector<at::Tensor> rows;
  for (const auto& step : steps) {
    const auto& sent = step.communication;
    rows.push_back(
        at::tensor(
            {step.loss,
             step.seconds,
             sent.seconds,
             static_cast<double>(sent.messages),
             static_cast<double>(sent.all_reduces),
             static_cast<double>(sent.bytes)},
            at::kDouble));
  }
  return at::stack(rows);
}

/// Of each class, on the slices that `labels` leaves out.
at::Tensor dice_on_unseen(
    const at::Tensor& prediction,
    const at::Tensor& labels,
    const at::Tensor& truth) {
  const auto certain = at::one_hot(prediction, kClasses).movedim(-1, 1);
  return dice(certain, truth.masked_fill(labels >= 0, -100));
}

class Training {
 public:
  explicit Training(const Arguments& arguments)
      : arguments_(arguments),
        mesh_(make_mesh(arguments.mesh)),
        speaks_(mesh_->position() == 0) {}

  void run() {
    auto brain = read_tensors(arguments_.folder + "/brain.bin");
    const auto device = DistributedManager::get().device();
    const auto volume = shard(brain.at("volume").to(device), mesh_, 2);
    const auto labels = shard(brain.at("labels").to(device), mesh_, 1);
    if (speaks_) {
      std::cout << *shardtensor::spec(volume) << std::endl;
    }
    // What a process loads and opens with its first step is no part of
    // training.
    const auto few = [](const at::Tensor& x) { return x.narrow(-1, 0, 8); };
    auto warm = new_model();
    segmentation_loss(warm->forward(few(volume)), few(labels)).backward();

    std::map<std::string, at::Tensor> shown;
    const PeakMemory memory;
    auto model = new_model();
    shown["steps"] =
        rows(learn(model, volume, labels, arguments_.steps, speaks_));
    shown["memory"] =
        at::tensor({memory.added(), PeakMemory::peak()}, at::kLong);
    const auto prediction = predict(model, volume);
    shown["alone"] = rows(alone(volume, labels));
    if (speaks_) {
      say_scores(
          dice_on_unseen(prediction, brain.at("labels"), brain.at("truth")));
      shown["prediction"] = prediction;
      add_cuts(shown, volume);
    }
    write(shown);
  }

 private:
  UNet new_model() const {
    auto model = load_model(arguments_.folder + "/weights.bin");
    model->to(DistributedManager::get().device());
    return model;
  }

  static std::vector<Step> learn(
      UNet& model,
      const at::Tensor& volume,
      const at::Tensor& labels,
      int64_t steps,
      bool speaks) {
    const torch::optim::AdamWOptions options(kLearningRate);
    return train(model->parameters(), options, steps, speaks, [&](int64_t) {
      return segmentation_loss(model->forward(volume), labels);
    });
  }

  /// The ceiling: some steps of every rank on its pieces as if it were alone.
  /// No messages, and wrong numbers.
  std::vector<Step> alone(const at::Tensor& volume, const at::Tensor& labels)
      const {
    auto model = new_model();
    return learn(
        model,
        shardtensor::to_local(volume).clone(),
        shardtensor::to_local(labels).clone(),
        std::min<int64_t>(3, arguments_.steps),
        /*speaks=*/false);
  }

  /// The class of each voxel, of the whole volume on every rank.
  static at::Tensor predict(UNet& model, const at::Tensor& volume) {
    const torch::NoGradGuard no_grad;
    return shardtensor::full_tensor(model->forward(volume).argmax(1)).cpu();
  }

  static void say_scores(const at::Tensor& scores) {
    std::printf(
        "Dice on slices never learnt from: other %.3f, grey matter %.3f, "
        "white matter %.3f\n",
        scores[0].item<double>(),
        scores[1].item<double>(),
        scores[2].item<double>());
  }

  /// The extents of the pieces, for each cut dim.
  static void add_cuts(
      std::map<std::string, at::Tensor>& shown,
      const at::Tensor& volume) {
    const auto& layout = shardtensor::spec(volume);
    for (const auto dim : layout->sharded_dims()) {
      const auto& partition = layout->partition(dim);
      std::vector<int64_t> extents;
      for (int64_t piece = 0; piece < partition.pieces(); ++piece) {
        extents.push_back(partition.interval(piece).extent());
      }
      shown[c10::str("cut of dim ", dim)] = at::tensor(extents, at::kLong);
    }
  }

  /// As FOLDER/2_ranks/rank_0.bin.
  void write(const std::map<std::string, at::Tensor>& shown) const {
    const auto& manager = DistributedManager::get();
    const auto folder = std::filesystem::path(arguments_.folder) /
        c10::str(manager.world_size(), "_ranks");
    std::filesystem::create_directories(folder);
    write_tensors(folder / c10::str("rank_", manager.rank(), ".bin"), shown);
  }

  Arguments arguments_;
  MeshPtr mesh_;
  bool speaks_;
};

} // namespace

int main(int count, char** values) {
  const auto arguments = parse(count, values);
  DistributedManager::initialize();
  Training(arguments).run();
  DistributedManager::cleanup(/*wait=*/true);
}
