#pragma once

#include <vector>

#include <torch/nn/functional/loss.h>
#include <torch/nn/functional/upsampling.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/normalization.h>

/// The UNet of examples/python/unet.py with its default style: group norm,
/// SiLU, strided and trilinear resampling. Nothing here knows about sharding.
/// Halves the volume channels.size() - 1 times and comes back.
class UNetImpl : public torch::nn::Module {
 public:
  UNetImpl(const std::vector<int64_t>& channels, int64_t classes)
      : head_(conv(channels[0], classes, 1)) {
    first_ = register_module("first", block(1, channels[0]));
    for (size_t i = 0; i + 1 < channels.size(); ++i) {
      const auto fine = channels[i];
      const auto coarse = channels[i + 1];
      downs_->push_back(
          torch::nn::Conv3d(
              torch::nn::Conv3dOptions(fine, coarse, 3).stride(2).padding(1)));
      encoders_->push_back(block(coarse, coarse));
      ups_->push_back(conv(coarse, fine, 1));
      decoders_->push_back(block(2 * fine, fine));
    }
    register_module("downs", downs_);
    register_module("encoders", encoders_);
    register_module("ups", ups_);
    register_module("decoders", decoders_);
    register_module("head", head_);
  }

  at::Tensor forward(at::Tensor x) {
    x = first_->forward(x);
    std::vector<at::Tensor> skips;
    for (size_t i = 0; i < downs_->size(); ++i) {
      skips.push_back(x);
      x = downs_->at<torch::nn::Conv3dImpl>(i).forward(x);
      x = encoders_->at<torch::nn::SequentialImpl>(i).forward(x);
    }
    for (size_t i = ups_->size(); i-- > 0;) {
      const auto& skip = skips[i];
      x = up(ups_->at<torch::nn::Conv3dImpl>(i).forward(x), skip);
      x = decoders_->at<torch::nn::SequentialImpl>(i).forward(
          at::cat({skip, x}, 1));
    }
    return head_->forward(x);
  }

 private:
  static torch::nn::Conv3d conv(int64_t inputs, int64_t outputs, int64_t size) {
    return torch::nn::Conv3d(torch::nn::Conv3dOptions(inputs, outputs, size));
  }

  /// Twice convolution, norm, activation.
  static torch::nn::Sequential block(int64_t inputs, int64_t outputs) {
    const auto wide = [](int64_t from, int64_t to) {
      return torch::nn::Conv3d(
          torch::nn::Conv3dOptions(from, to, 3).padding(1).bias(false));
    };
    return torch::nn::Sequential(
        wide(inputs, outputs),
        torch::nn::GroupNorm(4, outputs),
        torch::nn::SiLU(),
        wide(outputs, outputs),
        torch::nn::GroupNorm(4, outputs),
        torch::nn::SiLU());
  }

  /// x at the resolution of `skip`.
  static at::Tensor up(const at::Tensor& x, const at::Tensor& skip) {
    namespace F = torch::nn::functional;
    return F::interpolate(
        x,
        F::InterpolateFuncOptions()
            .size(skip.sizes().slice(2).vec())
            .mode(torch::kTrilinear)
            .align_corners(false));
  }

  torch::nn::Sequential first_;
  torch::nn::ModuleList downs_, encoders_, ups_, decoders_;
  torch::nn::Conv3d head_;
};
TORCH_MODULE(UNet);

/// The overlap of each class where labels has one (-100 has none): 1 where
/// prediction and truth agree.
inline at::Tensor dice(
    const at::Tensor& probabilities,
    const at::Tensor& labels) {
  const auto classes = at::arange(probabilities.size(1), labels.options());
  const auto truth = labels.unsqueeze(1) == classes.view({-1, 1, 1, 1});
  const std::vector<int64_t> dims{0, 2, 3, 4};
  const auto overlap = (probabilities * truth).sum(dims);
  const auto predicted = (probabilities * (labels >= 0).unsqueeze(1)).sum(dims);
  return (2 * overlap + 1) / (predicted + truth.sum(dims) + 1);
}

/// Cross-entropy plus one minus the mean Dice overlap of the classes. logits:
/// (N, classes, ...); labels: (N, ...), class numbers, or -100 where the class
/// is not to be learnt from.
inline at::Tensor segmentation_loss(
    const at::Tensor& logits,
    const at::Tensor& labels) {
  const auto cross_entropy = torch::nn::functional::cross_entropy(
      logits,
      labels,
      torch::nn::functional::CrossEntropyFuncOptions().ignore_index(-100));
  return cross_entropy + 1 - dice(logits.softmax(1), labels).mean();
}
