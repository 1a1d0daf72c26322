#include "shardtensor/rules/norm/passes.h"

#include <algorithm>
#include <iterator>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/rules/norm/norm_kernels.h"
#include "shardtensor/rules/norm/slices.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {

using at::Tensor;

at::ScalarType accumulate_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor wide(const Tensor& x) {
  return x.defined() ? x.to(accumulate_type(x)) : x;
}

Tensor kept_sum(const Tensor& x, const std::vector<int64_t>& dims) {
  return dims.empty() ? x : at::sum(x, dims, true);
}

Tensor with_leading_dims(const Tensor& x, int64_t dims) {
  if (!x.defined() || x.dim() >= dims) {
    return x;
  }
  auto sizes = x.sizes().vec();
  sizes.insert(sizes.begin(), dims - x.dim(), 1);
  return x.reshape(sizes);
}

namespace {

// ---- pieces -----------------------------------------------------------------

/// The rows [begin, begin + extent) of a tensor that broadcasts along `dim`.
Tensor rows(const Tensor& x, int64_t dim, int64_t begin, int64_t extent) {
  return x.defined() && x.size(dim) > 1 ? x.narrow(dim, begin, extent) : x;
}

/// Calls visit(pieces) for pieces of tensors that broadcast to the first one,
/// which cover it and are small enough to stay in cache. A compiler finds its
/// own pieces.
template <class Visit>
void visit_pieces(const std::vector<Tensor>& tensors, const Visit& visit) {
  const auto& largest = tensors[0];
  const int64_t limit = int64_t{1} << (largest.is_cpu() ? 17 : 25);
  if (largest.numel() <= limit || is_traced(largest)) {
    visit(tensors);
    return;
  }
  int64_t dim = 0;
  while (largest.size(dim) == 1) {
    ++dim;
  }
  const int64_t half = largest.size(dim) / 2;
  std::vector<Tensor> first;
  std::vector<Tensor> second;
  for (const auto& tensor : tensors) {
    first.push_back(rows(tensor, dim, 0, half));
    second.push_back(rows(tensor, dim, half, largest.size(dim) - half));
  }
  visit_pieces(first, visit);
  visit_pieces(second, visit);
}

/// A temporary that the pieces of one pass use in turn.
class Scratch {
 public:
  /// Of x's sizes, in the accumulation type; what it held before is lost.
  Tensor like(const Tensor& x) {
    const auto options = x.options().dtype(accumulate_type(x));
    if (is_traced(x)) {
      return at::empty_like(x, options);
    }
    if (!memory_.defined() || memory_.numel() < x.numel()) {
      memory_ = at::empty({x.numel()}, options);
    }
    return memory_.as_strided(
        x.sizes(), at::infer_dense_strides(x.sizes(), x.strides()), 0);
  }

 private:
  Tensor memory_;
};

/// x - mean, into `to`.
const Tensor& deviation(const Tensor& to, const Tensor& x, const Tensor& mean) {
  return mean.defined() ? at::sub_out(const_cast<Tensor&>(to), x, mean)
                        : to.copy_(x);
}

/// The result's own memory if it has the accumulation type.
Tensor place_for(const Tensor& result, Scratch& scratch) {
  return result.scalar_type() == accumulate_type(result) ? result
                                                         : scratch.like(result);
}

void store(const Tensor& value, const Tensor& result) {
  if (!value.is_same(result)) {
    result.copy_(value);
  }
}

std::vector<int64_t> sizes_with_ones(
    const Tensor& x,
    const std::vector<int64_t>& dims) {
  auto sizes = x.sizes().vec();
  for (const int64_t dim : dims) {
    sizes[dim] = 1;
  }
  return sizes;
}

Tensor zero_sums(const Tensor& x, const std::vector<int64_t>& dims) {
  return at::zeros(
      sizes_with_ones(x, dims), x.options().dtype(accumulate_type(x)));
}

} // namespace

// ---- statistics -------------------------------------------------------------

namespace {

/// The dims of a statistic that its slices leave.
std::vector<int64_t> without(
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& slice) {
  std::vector<int64_t> result;
  std::set_difference(
      dims.begin(),
      dims.end(),
      slice.begin(),
      slice.end(),
      std::back_inserter(result));
  return result;
}

Tensor sum_over(const Tensor& x, const std::vector<int64_t>& dims) {
  if (x.scalar_type() == accumulate_type(x)) {
    return kept_sum(x, dims);
  }
  auto result = zero_sums(x, dims);
  visit_pieces({x, result}, [&](const std::vector<Tensor>& piece) {
    piece[1].add_(kept_sum(wide(piece[0]), dims));
  });
  return result;
}

/// The sum of (x - mean)^2; without a mean, of x^2.
Tensor squares_about(
    const Tensor& x,
    const Tensor& mean,
    const std::vector<int64_t>& dims) {
  auto result = zero_sums(x, dims);
  Scratch scratch;
  visit_pieces({x, result, mean}, [&](const std::vector<Tensor>& piece) {
    const auto d = deviation(scratch.like(piece[0]), piece[0], piece[2]);
    piece[1].add_(kept_sum(d.mul_(d), dims));
  });
  return result;
}

Moments two_pass_moments(const Tensor& x, const std::vector<int64_t>& dims) {
  const auto count = std::max<int64_t>(count_over(x.sizes(), dims), 1);
  const auto mean = sum_over(x, dims) / at::Scalar(static_cast<double>(count));
  return {mean, squares_about(x, mean, dims)};
}

} // namespace

Moments own_moments(const Tensor& x, const std::vector<int64_t>& dims) {
  if (const auto slices = find_slices({x}, dims)) {
    const auto own = slice_moments(x, *slices);
    const auto rest = without(dims, slices->dims);
    const at::Scalar length(slices->length);
    return rest.empty()
        ? own
        : merge_moments(own, at::full_like(own.mean, length), rest);
  }
  // The first dim by itself: with the channels of a group side by side in
  // memory, the sums of each channel read x in order.
  const auto split = dims.begin() + (dims.size() > 1 ? 1 : 0);
  const std::vector<int64_t> first(dims.begin(), split);
  const auto parts = two_pass_moments(x, {split, dims.end()});
  const at::Scalar length(count_over(x.sizes(), {split, dims.end()}));
  return first.empty()
      ? parts
      : merge_moments(parts, at::full_like(parts.mean, length), first);
}

Tensor own_squares(const Tensor& x, const std::vector<int64_t>& dims) {
  if (const auto slices = find_slices({x}, dims)) {
    return kept_sum(
        slice_sums(x, Tensor(), x, *slices).products,
        without(dims, slices->dims));
  }
  return squares_about(x, {}, dims);
}

// ---- normalization ----------------------------------------------------------

namespace {

/// A weight of few elements per statistic costs no pass of its own.
bool folds_into(const Tensor& weight, const Tensor& rstd, const Tensor& x) {
  return weight.defined() &&
      c10::multiply_integers(at::infer_size(weight.sizes(), rstd.sizes())) <
      x.numel();
}

/// The dims of x along which none of `tensors`, of as many dims, varies.
std::vector<int64_t> constant_along(
    const Tensor& x,
    const std::vector<Tensor>& tensors) {
  std::vector<int64_t> result;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& tensor) {
          return !tensor.defined() || tensor.size(dim) == 1;
        })) {
      result.push_back(dim);
    }
  }
  return result;
}

/// Whether one launch on a GPU beats passes over memory.
bool suits_one_launch(const Tensor& x, const NormStatistics& statistics) {
  return have_cuda_kernels(x) && statistics.mean.defined() && x.numel() > 0 &&
      x.numel() < kManyElements;
}

} // namespace

Tensor apply_norm(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const NormStatistics& statistics) {
  const auto w = with_leading_dims(weight, x.dim());
  const auto b = with_leading_dims(bias, x.dim());
  if (suits_one_launch(x, statistics) && w.defined() == b.defined()) {
    const auto& [mean, rstd] = statistics;
    const auto result = w.defined()
        ? run_cuda_kernel(kNormAffine, {x, mean, rstd, w, b})
        : run_cuda_kernel(kNormPlain, {x, mean, rstd});
    return result.to(x.scalar_type());
  }
  const bool folds = folds_into(w, statistics.rstd, x);
  const auto scale = folds ? statistics.rstd * w : statistics.rstd;
  const auto rest = folds ? Tensor() : w;
  const auto constant = constant_along(x, {scale, rest, b});
  if (const auto slices = find_slices({x}, constant)) {
    return scale_slices(x, statistics.mean, scale, b, *slices);
  }
  const auto result = at::empty_like(x);
  Scratch scratch;
  visit_pieces(
      {x, result, statistics.mean, scale, rest, b},
      [&](const std::vector<Tensor>& piece) {
        const auto y =
            deviation(place_for(piece[1], scratch), piece[0], piece[2]);
        y.mul_(piece[3]);
        if (piece[4].defined()) {
          y.mul_(piece[4]);
        }
        if (piece[5].defined()) {
          y.add_(piece[5]);
        }
        store(y, piece[1]);
      });
  return result;
}

// ---- gradients --------------------------------------------------------------

namespace {

/// Dims along which weight and bias do not vary.
struct ConstantDims {
  std::vector<int64_t> inner; // that a statistic covers
  std::vector<int64_t> outer;
};

ConstantDims constant_dims(
    const Tensor& x,
    const Tensor& weight,
    const std::vector<int64_t>& bias_sizes,
    const NormGeometry& geometry) {
  const auto varies = [&](at::IntArrayRef sizes, int64_t dim) {
    const auto own = dim - (x.dim() - static_cast<int64_t>(sizes.size()));
    return own >= 0 && sizes[own] != 1;
  };
  ConstantDims result;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if ((weight.defined() && varies(weight.sizes(), dim)) ||
        varies(bias_sizes, dim)) {
      continue;
    }
    const bool covered =
        std::binary_search(geometry.dims.begin(), geometry.dims.end(), dim);
    (covered ? result.inner : result.outer).push_back(dim);
  }
  return result;
}

/// The sums of y, and of y * (x - mean).
SliceSums deviation_sums(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& y,
    const std::vector<int64_t>& dims) {
  if (const auto slices = find_slices({x, y}, dims)) {
    const auto sums = slice_sums(x, mean, y, *slices);
    const auto rest = without(dims, slices->dims);
    return {kept_sum(sums.values, rest), kept_sum(sums.products, rest)};
  }
  const SliceSums result{zero_sums(x, dims), zero_sums(x, dims)};
  Scratch scratch;
  visit_pieces(
      {x, y, result.values, result.products, mean},
      [&](const std::vector<Tensor>& piece) {
        const auto product =
            deviation(scratch.like(piece[0]), piece[0], piece[4]);
        piece[3].add_(kept_sum(product.mul_(piece[1]), dims));
        piece[2].add_(sum_over(piece[1], dims));
      });
  return result;
}

/// Where weight and bias are constant along `inner`: sums over these first.
NormSums sums_by_slice(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const NormStatistics& statistics,
    const std::vector<int64_t>& inner,
    const NormGeometry& geometry) {
  const auto [sums, deviations] =
      deviation_sums(x, statistics.mean, grad, inner);
  const auto products = deviations * statistics.rstd;
  const auto weighted = [&](const Tensor& slices) {
    return kept_sum(weight.defined() ? slices * weight : slices, geometry.dims);
  };
  return {weighted(sums), weighted(products), products, sums};
}

/// Where they vary with every element of a statistic.
NormSums sums_by_element(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const NormStatistics& statistics,
    const std::vector<int64_t>& outer,
    const NormGeometry& geometry) {
  const NormSums result{
      zero_sums(x, geometry.dims),
      zero_sums(x, geometry.dims),
      zero_sums(x, outer),
      zero_sums(x, outer)};
  Scratch scratch;
  visit_pieces(
      {x,
       grad,
       statistics.mean,
       statistics.rstd,
       weight,
       result.sum,
       result.product,
       result.weight,
       result.bias},
      [&](const std::vector<Tensor>& piece) {
        const auto g = wide(piece[1]);
        const auto& w = piece[4];
        const auto product =
            deviation(scratch.like(piece[0]), piece[0], piece[2]);
        product.mul_(piece[3]).mul_(g);
        piece[7].add_(kept_sum(product, outer));
        piece[8].add_(kept_sum(g, outer));
        piece[6].add_(
            kept_sum(w.defined() ? product.mul_(w) : product, geometry.dims));
        piece[5].add_(kept_sum(w.defined() ? g * w : g, geometry.dims));
      });
  return result;
}

} // namespace

NormSums norm_sums(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const std::vector<int64_t>& bias_sizes,
    const NormStatistics& statistics,
    const NormGeometry& geometry) {
  const auto w = with_leading_dims(weight, x.dim());
  const auto [inner, outer] = constant_dims(x, weight, bias_sizes, geometry);
  return inner.empty()
      ? sums_by_element(grad, x, w, statistics, outer, geometry)
      : sums_by_slice(grad, x, w, statistics, inner, geometry);
}

Tensor norm_input_gradient(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const NormStatistics& statistics,
    const Tensor& sum,
    const Tensor& product,
    const NormGeometry& geometry) {
  const at::Scalar count(static_cast<double>(geometry.count));
  const auto w = with_leading_dims(weight, x.dim());
  if (suits_one_launch(x, statistics)) {
    const auto& [mean, rstd] = statistics;
    const auto result = w.defined()
        ? run_cuda_kernel(
              kWeightedNormGradient,
              {grad, x, mean, rstd, w, sum, product},
              {count})
        : run_cuda_kernel(
              kNormGradient, {grad, x, mean, rstd, sum, product}, {count});
    return result.to(x.scalar_type());
  }
  const bool folds = folds_into(w, statistics.rstd, x);
  const auto scale = at::square(statistics.rstd) * (product / count).neg();
  const auto shift =
      geometry.centered ? statistics.rstd * (sum / count).neg() : Tensor();
  const auto scale_grad = folds ? statistics.rstd * w : statistics.rstd;
  const auto rest = folds ? Tensor() : w;
  const auto constant = constant_along(x, {scale_grad, rest});
  const auto slices = find_slices({x, grad}, constant);
  if (slices && worth_combining(x, *slices)) {
    return combine_slices(
        x, statistics.mean, scale, grad, scale_grad, shift, *slices);
  }
  const auto result = at::empty_like(x);
  Scratch scratch;
  visit_pieces(
      {x, grad, result, statistics.mean, scale, shift, scale_grad, rest},
      [&](const std::vector<Tensor>& piece) {
        const auto dx =
            deviation(place_for(piece[2], scratch), piece[0], piece[3]);
        dx.mul_(piece[4]);
        if (piece[5].defined()) {
          dx.add_(piece[5]);
        }
        const auto g =
            piece[7].defined() ? wide(piece[1]) * piece[7] : piece[1];
        dx.addcmul_(g, piece[6]);
        store(dx, piece[2]);
      });
  return result;
}

} // namespace shardtensor::detail
