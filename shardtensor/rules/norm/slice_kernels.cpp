#include "shardtensor/rules/norm/slice_kernels.h"

#include <algorithm>
#include <array>
#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/rules/norm/passes.h"

namespace shardtensor::detail {

using at::Tensor;

namespace {

constexpr int64_t kBlocks = 1024; // channels that fill a device
constexpr int64_t kFewBlocks = 64; // that leave most of it idle
constexpr int64_t kBlock = 4096; // elements worth a block of threads
constexpr int64_t kShortBlock = 512; // that leave most of a block idle
constexpr int64_t kManySets = 16; // of interleaved slices: a call each

// ---- which slices
// ------------------------------------------------------------

/// The sets of slices that lie interleaved, or the slices that do not.
int64_t sets_of(const Tensor& x, const Slices& slices) {
  return x.numel() / (slices.length * slices.width);
}

/// A kernel gives each channel to one block of threads, so long slices are cut:
/// into the most equal parts, as far as blocks are wanted.
int64_t parts_of(const Tensor& x, const Slices& slices) {
  int64_t parts = std::min(
      std::max<int64_t>(kBlocks / sets_of(x, slices), 1),
      std::max<int64_t>(slices.length / kBlock, 1));
  while (slices.length % parts != 0) {
    --parts;
  }
  return parts;
}

} // namespace

bool have_kernels(const Tensor& x) {
  static const std::array operators = [] {
    const auto find = [](const char* name) {
      return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    };
    return std::array{
        find("aten::batch_norm_elemt"),
        find("aten::batch_norm_update_stats"),
        find("aten::batch_norm_backward_reduce"),
        find("aten::batch_norm_backward_elemt")};
  }();
  const auto key =
      c10::computeDispatchKey(x.scalar_type(), x.layout(), x.device());
  return x.is_floating_point() &&
      std::all_of(operators.begin(), operators.end(), [&](const auto& op) {
           return op.hasKernelForDispatchKey(key);
         });
}

bool worth_combining(const Tensor& x, const Slices& slices) {
  return slices.order.empty() || x.numel() >= kManyElements;
}

bool suit_kernels(const Tensor& x, const Slices& slices) {
  if (slices.length == 1 || x.numel() > std::numeric_limits<int32_t>::max()) {
    return false; // with 64-bit indices they are others, not as exact
  }
  const auto sets = sets_of(x, slices);
  if (slices.width > 1) {
    return sets <= kManySets;
  }
  const auto parts = parts_of(x, slices);
  const bool fill =
      sets * parts >= kFewBlocks || slices.length / parts <= 8 * kBlock;
  return fill && (slices.length >= kShortBlock || sets <= 4 * kBlocks);
}

// ---- slices as channels
// ------------------------------------------------------

namespace {

/// Calls of (1, channels, part) for slices side by side, or one call for each
/// set of interleaved slices of (elements, channels).
class Channels {
 public:
  Channels(const Tensor& x, const Slices& slices)
      : slices_(slices),
        sizes_(x.sizes().vec()),
        options_(x.options().dtype(accumulate_type(x))),
        sets_(sets_of(x, slices)),
        parts_(slices.width == 1 ? parts_of(x, slices) : 1) {
    for (const int64_t dim : slices.dims) {
      sizes_[dim] = 1;
    }
  }

  int64_t calls() const {
    return slices_.width == 1 ? 1 : sets_;
  }
  int64_t channels() const {
    return slices_.width == 1 ? sets_ * parts_ : slices_.width;
  }
  int64_t part() const {
    return slices_.length / parts_;
  }

  /// What the calls see of a tensor, one below the other.
  Tensor seen(const Tensor& x) const {
    const auto in_order = x.permute(slices_.order);
    return slices_.width == 1
        ? in_order.view({1, 1, channels(), part()})
        : in_order.view({sets_, slices_.length, slices_.width});
  }

  /// The calls' results together, as a tensor like `x`.
  Tensor joined(const std::vector<Tensor>& results, const Tensor& x) const {
    const auto all = results.size() == 1 ? results[0] : at::stack(results);
    return in_dims(all, x.permute(slices_.order).sizes());
  }

  /// What is known of the slices, a row of channels for each call.
  Tensor known(const Tensor& tensor) const {
    auto by_slice = tensor.to(options_.dtype())
                        .expand(sizes_)
                        .permute(slices_.order)
                        .reshape({sets_ * slices_.width, 1});
    return by_slice.expand({-1, parts_})
        .reshape({calls(), channels()})
        .contiguous(); // a number for all slices is expanded
  }
  Tensor known_or_zero(const Tensor& tensor) const {
    return tensor.defined() ? known(tensor)
                            : at::zeros({calls(), channels()}, options_);
  }

  /// The sums of channels as those of slices.
  Tensor total(const std::vector<Tensor>& rows) const {
    const auto parts = by_part(rows);
    return by_slice(parts_ == 1 ? parts : at::sum(parts, at::IntArrayRef{1}));
  }

  /// The moments of channels as those of slices.
  Moments merged(
      const std::vector<Tensor>& means,
      const std::vector<Tensor>& variances) const {
    const Moments parts{by_part(means), by_part(variances) * part()};
    if (parts_ == 1) {
      return {by_slice(parts.mean), by_slice(parts.squares)};
    }
    const auto all =
        merge_moments(parts, at::full_like(parts.mean, part()), {1});
    return {by_slice(all.mean), by_slice(all.squares)};
  }

 private:
  Tensor by_part(const std::vector<Tensor>& rows) const {
    return (rows.size() == 1 ? rows[0] : at::stack(rows)).view({-1, parts_});
  }
  Tensor by_slice(const Tensor& values) const {
    std::vector<int64_t> in_order;
    for (const int64_t dim : slices_.order) {
      in_order.push_back(sizes_[dim]);
    }
    return in_dims(values, in_order);
  }
  /// A tensor of `sizes` in the order of memory, with its dims back in place.
  Tensor in_dims(const Tensor& tensor, at::IntArrayRef sizes) const {
    std::vector<int64_t> place(slices_.order.size());
    for (size_t i = 0; i < place.size(); ++i) {
      place[slices_.order[i]] = static_cast<int64_t>(i);
    }
    return tensor.view(sizes).permute(place);
  }

  const Slices& slices_;
  std::vector<int64_t> sizes_; // of what is known of each slice
  at::TensorOptions options_;
  int64_t sets_;
  int64_t parts_;
};

} // namespace

// ---- passes -----------------------------------------------------------------

Moments moments_by_kernels(const Tensor& x, const Slices& slices) {
  const Channels channels(x, slices);
  const auto seen = channels.seen(x);
  std::vector<Tensor> means;
  std::vector<Tensor> variances;
  for (int64_t call = 0; call < channels.calls(); ++call) {
    auto [mean, variance] =
        at::batch_norm_update_stats(seen[call], {}, {}, /*momentum=*/0);
    means.push_back(std::move(mean));
    variances.push_back(std::move(variance));
  }
  return channels.merged(means, variances);
}

SliceSums sums_by_kernels(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& y,
    const Slices& slices) {
  const Channels channels(x, slices);
  const auto seen = channels.seen(x);
  const auto seen_y = channels.seen(y);
  const auto means = channels.known_or_zero(mean);
  std::vector<Tensor> values;
  std::vector<Tensor> products;
  for (int64_t call = 0; call < channels.calls(); ++call) {
    auto [sum, product, weight, bias] = at::batch_norm_backward_reduce(
        seen_y[call],
        seen[call],
        means[call],
        /*invstd=*/means[call], // of the weight's gradient alone
        /*weight=*/{},
        /*input_g=*/true,
        /*weight_g=*/false,
        /*bias_g=*/false);
    values.push_back(std::move(sum));
    products.push_back(std::move(product));
  }
  return {channels.total(values), channels.total(products)};
}

Tensor scale_by_kernels(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& scale,
    const Tensor& bias,
    const Slices& slices) {
  const Channels channels(x, slices);
  const auto seen = channels.seen(x);
  const auto means = channels.known_or_zero(mean);
  const auto scales = channels.known(scale);
  const auto shifts = bias.defined() ? channels.known(bias) : Tensor();
  std::vector<Tensor> results;
  for (int64_t call = 0; call < channels.calls(); ++call) {
    results.push_back(
        at::batch_norm_elemt(
            seen[call],
            /*weight=*/{},
            bias.defined() ? std::optional(shifts[call]) : std::nullopt,
            means[call],
            /*invstd=*/scales[call],
            /*eps=*/0));
  }
  return channels.joined(results, x);
}

// Note [Any sum by the kernel of a gradient]
// PyTorch's kernel computes (y - shift - (x - mean) * slope) * factor for each
// channel, in fp32 also for half precision, where two operators would round in
// between. So factor is scale_y, and what is added is divided by it first. A
// weight of zero makes it zero: then, and where it is tiny beside the others, a
// number 1e-20 times as large as they are takes its place. What that adds is
// beyond all rounding, and the quotients stay far from overflow, so no digit of
// any term is lost.
namespace {

Tensor divisor(const Tensor& factor, const Tensor& scale, const Tensor& bias) {
  const auto others = at::maximum(scale.abs(), bias.abs());
  const auto least = at::maximum(others * 1e-20, others.clamp_max(1e-36));
  return at::where(factor.abs() < least, least, factor);
}

} // namespace

Tensor combine_by_kernels(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& scale,
    const Tensor& y,
    const Tensor& scale_y,
    const Tensor& bias,
    const Slices& slices) {
  const Channels channels(x, slices);
  const auto seen = channels.seen(x);
  const auto seen_y = channels.seen(y);
  const auto means = channels.known_or_zero(mean);
  const auto scales = channels.known(scale);
  const auto biases = channels.known_or_zero(bias);
  const auto factors = channels.known(scale_y);
  const auto factor = divisor(factors, scales, biases);
  const auto one = at::ones({channels.channels()}, factor.options());
  const auto by = at::where(factor == 0, one, factor); // then all are zero
  const auto shift = (biases / by).neg_();
  const auto slope = (scales / by).neg_();
  const auto count = at::ones({1}, factor.options().dtype(at::kInt));
  std::vector<Tensor> results;
  for (int64_t call = 0; call < channels.calls(); ++call) {
    results.push_back(
        at::batch_norm_backward_elemt(
            seen_y[call],
            seen[call],
            means[call],
            /*invstd=*/one,
            /*weight=*/factor[call],
            /*sum_dy=*/shift[call],
            /*sum_dy_xmu=*/slope[call],
            count));
  }
  return channels.joined(results, x);
}

} // namespace shardtensor::detail
