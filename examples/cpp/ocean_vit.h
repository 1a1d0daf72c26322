#pragma once

#include <vector>

#include <ATen/ATen.h>
#include <shardtensor/rules/neighborhood/neighborhood.h>
#include <torch/expanding_array.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

/// The shape of an OceanViT. `window` is the number of patches along latitude
/// and longitude that a patch attends to; empty: all.
struct OceanViTOptions {
  int64_t channels = 0;
  int64_t width = 0;
  int64_t depth = 0;
  int64_t heads = 0;
  std::vector<int64_t> patch;
  std::vector<int64_t> window;
};

/// Attention among patches, then a perceptron on each.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const OceanViTOptions& options)
      : heads_(options.heads), window_(options.window) {
    const auto width = options.width;
    const torch::nn::LayerNormOptions norm({width});
    norm1_ = register_module("norm1", torch::nn::LayerNorm(norm));
    norm2_ = register_module("norm2", torch::nn::LayerNorm(norm));
    qkv_ = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out_ = register_module("out", torch::nn::Linear(width, width));
    mlp_ = register_module(
        "mlp",
        torch::nn::Sequential(
            torch::nn::Linear(width, 4 * width),
            torch::nn::GELU(),
            torch::nn::Linear(4 * width, width)));
  }

  at::Tensor forward(at::Tensor grid) {
    grid = grid + out_->forward(attend(norm1_->forward(grid)));
    return grid + mlp_->forward(norm2_->forward(grid));
  }

 private:
  /// Over (B, rows, columns, width).
  at::Tensor attend(const at::Tensor& grid) {
    const auto parts =
        qkv_->forward(grid).unflatten(-1, {3, heads_, -1}).unbind(-3);
    if (!window_.empty()) {
      return shardtensor::neighborhood_attention(
                 parts[0], parts[1], parts[2], window_)
          .flatten(-2);
    }
    const auto tokens = [](const at::Tensor& x) {
      return x.flatten(1, 2).transpose(1, 2);
    };
    const auto attended = at::scaled_dot_product_attention(
        tokens(parts[0]), tokens(parts[1]), tokens(parts[2]));
    return attended.transpose(1, 2).flatten(-2).unflatten(
        1, grid.sizes().slice(1, 2));
  }

  int64_t heads_;
  std::vector<int64_t> window_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, out_{nullptr};
  torch::nn::Sequential mlp_{nullptr};
};
TORCH_MODULE(Block);

/// The vision transformer of examples/python/ocean_vit.py: (B, channels,
/// latitude, longitude) -> (B, 1, latitude, longitude), the first channel and
/// what the model adds to it. Nothing here knows about sharding.
class OceanViTImpl : public torch::nn::Module {
 public:
  explicit OceanViTImpl(const OceanViTOptions& options) {
    const auto& o = options;
    const torch::ExpandingArray<2> patch(o.patch);
    embed_ = register_module(
        "embed",
        torch::nn::Conv2d(
            torch::nn::Conv2dOptions(o.channels, o.width, patch)
                .stride(patch)));
    for (int64_t i = 0; i < o.depth; ++i) {
      blocks_->push_back(Block(o));
    }
    register_module("blocks", blocks_);
    norm_ = register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})));
    head_ = register_module(
        "head",
        torch::nn::ConvTranspose2d(
            torch::nn::ConvTranspose2dOptions(o.width, 1, patch)
                .stride(patch)));
  }

  at::Tensor forward(const at::Tensor& fields) {
    auto grid = embed_->forward(fields).movedim(1, -1);
    for (const auto& block : *blocks_) {
      grid = block->as<BlockImpl>()->forward(grid);
    }
    grid = norm_->forward(grid).movedim(-1, 1);
    return fields.narrow(1, 0, 1) + head_->forward(grid);
  }

  /// Grid points per patch.
  std::vector<int64_t> patch() const {
    return embed_->weight.sizes().slice(2).vec();
  }

 private:
  torch::nn::Conv2d embed_{nullptr};
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::ConvTranspose2d head_{nullptr};
};
TORCH_MODULE(OceanViT);
