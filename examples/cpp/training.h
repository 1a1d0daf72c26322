#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <shardtensor/shardtensor.h>
#include <torch/nn/module.h>
#include <torch/optim/adamw.h>

// What the training examples share: the loop of examples/python/training.py.

/// "2x2" -> {2, 2}.
inline std::vector<int64_t> numbers(
    const std::string& option,
    const std::string& text) {
  std::vector<int64_t> result;
  for (const char* rest = text.c_str(); *rest;) {
    char* end = nullptr;
    result.push_back(std::strtol(rest, &end, 10));
    TORCH_CHECK(end != rest, option, " ", text, ": expected 4 or 2x2");
    rest = *end == 'x' ? end + 1 : end;
  }
  return result;
}

/// A mesh of 1 to 3 axes; axis i cuts spatial dim i.
inline shardtensor::MeshPtr make_mesh(const std::vector<int64_t>& shape) {
  std::vector<std::string> names{"domain_x", "domain_y", "domain_z"};
  names.resize(shape.size());
  return shardtensor::DistributedManager::get().initialize_mesh(shape, names);
}

inline void load_weights(
    torch::nn::Module& model,
    const std::map<std::string, at::Tensor>& weights) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model.named_parameters()) {
    parameter.value().copy_(weights.at(parameter.key()));
  }
}

/// From 0 to 1.
inline double half_cosine(double share) {
  return (1 - std::cos(std::acos(-1.0) * share)) / 2;
}

/// One cycle: the learning rate rises to its peak in the first third and falls
/// to zero, the momentum goes the other way; both as a cosine.
inline void schedule(
    torch::optim::AdamWOptions& options,
    double learning_rate,
    int64_t number,
    int64_t steps) {
  const double top = std::max(0.3 * static_cast<double>(steps) - 1, 2.0);
  const double at = static_cast<double>(number);
  const double last = static_cast<double>(steps - 1);
  const bool rises = at < top;
  const double height = rises
      ? half_cosine(at / top)
      : 1 - half_cosine((at - top) / std::max(last - top, 1.0));
  options.lr(learning_rate * (rises ? 0.04 + 0.96 * height : height));
  options.betas({0.95 - 0.1 * height, 0.95});
}

/// What one step came to, on this rank.
struct Step {
  double loss;
  double seconds;
  shardtensor::CommStats communication;
};

/// Steps of AdamW; `loss_of(number)` runs the model forward. One rank, the one
/// that `speaks`, prints each step.
template <class LossOf>
std::vector<Step> train(
    const std::vector<at::Tensor>& parameters,
    torch::optim::AdamWOptions given,
    int64_t steps,
    bool speaks,
    const LossOf& loss_of) {
  const double learning_rate = given.lr();
  torch::optim::AdamW optimizer(parameters, std::move(given));
  auto& options = static_cast<torch::optim::AdamWOptions&>(
      optimizer.param_groups()[0].options());
  std::vector<Step> done;
  for (int64_t number = 0; number < steps; ++number) {
    shardtensor::reset_comm_stats();
    const auto begin = std::chrono::steady_clock::now();
    schedule(options, learning_rate, number, steps);
    optimizer.zero_grad();
    const at::Tensor loss = loss_of(number);
    loss.backward();
    optimizer.step();
    const double value = loss.item<double>();
    const std::chrono::duration<double> seconds =
        std::chrono::steady_clock::now() - begin;
    done.push_back({value, seconds.count(), shardtensor::comm_stats()});
    if (speaks) {
      std::printf(
          "step %2ld  loss %.6f  %.2f s\n", number + 1, value, seconds.count());
      std::fflush(stdout);
    }
  }
  return done;
}
