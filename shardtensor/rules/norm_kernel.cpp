#include <algorithm>
#include <mutex>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/square.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/rules/norm.h"
#include "shardtensor/rules/reduction.h"
#include "shardtensor/tensor/node.h"

namespace shardtensor {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

at::ScalarType accumulate_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor wide(const Tensor& x) {
  return x.defined() ? x.to(accumulate_type(x)) : x;
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

Tensor zeros_like_statistic(const Tensor& x, const std::vector<int64_t>& dims) {
  return at::zeros(
      sizes_with_ones(x, dims), x.options().dtype(accumulate_type(x)));
}

/// An empty list of dims means none here, not all.
Tensor kept_sum(const Tensor& x, const std::vector<int64_t>& dims) {
  return dims.empty() ? x : at::sum(x, dims, true);
}

// ---- sums over large tensors without large temporaries ----------------------

/// The rows [begin, begin + extent) of a tensor that broadcasts along `dim`.
Tensor rows(const Tensor& x, int64_t dim, int64_t begin, int64_t extent) {
  return x.defined() && x.size(dim) > 1 ? x.narrow(dim, begin, extent) : x;
}

/// Calls visit(pieces) for pieces of tensors that broadcast to the first one,
/// which cover it and are small enough to stay in cache.
template <class Visit>
void visit_pieces(const std::vector<Tensor>& tensors, const Visit& visit) {
  const auto& largest = tensors[0];
  const int64_t limit = int64_t{1} << (largest.is_cpu() ? 16 : 25);
  if (largest.numel() <= limit) {
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

Tensor sum_over(const Tensor& x, const std::vector<int64_t>& dims) {
  auto result = zeros_like_statistic(x, dims);
  visit_pieces({x, result}, [&](const std::vector<Tensor>& piece) {
    piece[1].add_(kept_sum(wide(piece[0]), dims));
  });
  return result;
}

/// sum of (x - mean)^2; without a mean, of x^2.
Tensor sum_squares(
    const Tensor& x,
    const Tensor& mean,
    const std::vector<int64_t>& dims) {
  auto result = zeros_like_statistic(x, dims);
  visit_pieces({x, result, mean}, [&](const std::vector<Tensor>& piece) {
    const auto x_wide = wide(piece[0]);
    const auto squares =
        piece[2].defined() ? (x_wide - piece[2]).square_() : at::square(x_wide);
    piece[1].add_(kept_sum(squares, dims));
  });
  return result;
}

// ---- statistics over ranks --------------------------------------------------

/// Mean and squares of all ranks together from those of each (Chan, Golub and
/// LeVeque, 1979).
NormMoments merge_moments(
    const Tensor& mean,
    const Tensor& squares,
    int64_t count,
    const NormGeometry& geometry) {
  const auto sizes = mean.sizes().vec();
  const auto counts =
      at::full_like(mean, at::Scalar(static_cast<double>(count)));
  const auto own = at::IntArrayRef(geometry.statistics->local_sizes());
  const auto terms = gather_terms(
      {mean.view(own), squares.view(own), counts.view(own)},
      geometry.statistics,
      geometry.axes);
  const auto weights =
      terms[2] / at::Scalar(static_cast<double>(geometry.count));
  const auto total = at::sum(terms[0] * weights, at::IntArrayRef{0}, true);
  const auto between = at::square(terms[0] - total) * terms[2];
  return {
      total.view(sizes),
      at::sum(terms[1] + between, at::IntArrayRef{0}, false).view(sizes)};
}

} // namespace

NormMoments norm_moments(const Tensor& input, const NormGeometry& geometry) {
  const at::NoGradGuard no_grad;
  const auto x = input.detach();
  int64_t count = 1;
  for (const int64_t dim : geometry.dims) {
    count *= x.size(dim);
  }
  if (!geometry.centered) {
    return {
        Tensor(),
        all_reduce(
            sum_squares(x, {}, geometry.dims),
            Reduce::Sum,
            *geometry.statistics->mesh(),
            geometry.axes)};
  }
  const auto mean = sum_over(x, geometry.dims) /
      at::Scalar(static_cast<double>(std::max<int64_t>(count, 1)));
  const auto squares = sum_squares(x, mean, geometry.dims);
  return geometry.axes.empty() ? NormMoments{mean, squares}
                               : merge_moments(mean, squares, count, geometry);
}

// ---- normalization and its gradient -----------------------------------------

namespace {

struct Statistics {
  Tensor mean; // undefined when not centered
  Tensor rstd;
};

Statistics statistics_of(
    const NormMoments& moments,
    double eps,
    const NormGeometry& geometry) {
  const at::Scalar count(static_cast<double>(geometry.count));
  return {moments.mean, (moments.squares / count + eps).rsqrt()};
}

/// The same as a differentiable function of x. Communication: two all-reduces.
Statistics differentiable_statistics(
    const Tensor& x,
    double eps,
    const NormGeometry& geometry) {
  const at::Scalar count(static_cast<double>(geometry.count));
  const auto total = [&](const Tensor& values) {
    return all_reduce(
        kept_sum(values, geometry.dims),
        Reduce::Sum,
        *geometry.statistics->mesh(),
        geometry.axes);
  };
  const auto x_wide = wide(x);
  if (!geometry.centered) {
    return {Tensor(), (total(at::square(x_wide)) / count + eps).rsqrt()};
  }
  const auto mean = total(x_wide) / count;
  return {mean, (total(at::square(x_wide - mean)) / count + eps).rsqrt()};
}

Tensor centered(const Tensor& x, const Statistics& statistics) {
  return statistics.mean.defined() ? wide(x) - statistics.mean : wide(x);
}

/// Ones in front, so that all tensors of a formula have the same dims.
Tensor with_dims(const Tensor& x, int64_t dims) {
  if (!x.defined() || x.dim() >= dims) {
    return x;
  }
  auto sizes = x.sizes().vec();
  sizes.insert(sizes.begin(), dims - x.dim(), 1);
  return x.reshape(sizes);
}

/// A weight of few elements per statistic costs no pass of its own.
bool folds_into(const Tensor& weight, const Tensor& rstd, const Tensor& x) {
  return weight.defined() &&
      c10::multiply_integers(at::infer_size(weight.sizes(), rstd.sizes())) <
      x.numel();
}

/// x - mean in the accumulation type, in the memory of `result` if it has that
/// type.
Tensor deviation(const Tensor& x, const Tensor& mean, const Tensor& result) {
  auto to = result.scalar_type() == accumulate_type(x)
      ? result
      : at::empty_like(x, x.options().dtype(accumulate_type(x)));
  return mean.defined() ? at::sub_out(to, x, mean) : to.copy_(x);
}

void store(const Tensor& value, const Tensor& result) {
  if (!value.is_same(result)) {
    result.copy_(value);
  }
}

Tensor apply_norm(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const Statistics& statistics) {
  const auto result = at::empty_like(x);
  const auto w = with_dims(weight, x.dim());
  const bool folds = folds_into(w, statistics.rstd, x);
  const auto scale = folds ? statistics.rstd * w : statistics.rstd;
  visit_pieces(
      {x,
       result,
       statistics.mean,
       scale,
       folds ? Tensor() : w,
       with_dims(bias, x.dim())},
      [](const std::vector<Tensor>& piece) {
        auto y = deviation(piece[0], piece[2], piece[1]);
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

/// Sums over all ranks of the gradient, and of the gradient times the
/// normalized value, for each statistic: one message.
std::pair<Tensor, Tensor> total_pair(
    const Tensor& sum,
    const Tensor& product,
    const NormGeometry& geometry) {
  const auto& mesh = *geometry.statistics->mesh();
  if (!geometry.centered) {
    return {Tensor(), all_reduce(product, Reduce::Sum, mesh, geometry.axes)};
  }
  const auto total =
      all_reduce(at::stack({sum, product}), Reduce::Sum, mesh, geometry.axes);
  return {total.select(0, 0), total.select(0, 1)};
}

struct Gradients {
  Tensor x;
  Tensor weight;
  Tensor bias;
};

struct Wanted {
  bool x;
  bool weight;
  bool bias;
};

/// By differentiable operators, for double backward.
Gradients composed_gradients(
    const Tensor& grad_output,
    const Tensor& x,
    const Tensor& weight,
    const std::vector<int64_t>& bias_sizes,
    const Statistics& statistics,
    const Wanted& wanted,
    const NormGeometry& geometry) {
  const auto grad = wide(grad_output);
  const auto normalized = centered(x, statistics) * statistics.rstd;
  Gradients result;
  if (wanted.x) {
    const at::Scalar count(static_cast<double>(geometry.count));
    const auto scaled = weight.defined() ? grad * weight : grad;
    const auto [sum, product] = total_pair(
        kept_sum(scaled, geometry.dims),
        kept_sum(scaled * normalized, geometry.dims),
        geometry);
    auto inner = scaled - normalized * (product / count);
    if (geometry.centered) {
      inner = inner - sum / count;
    }
    result.x = (inner * statistics.rstd).to(x.scalar_type());
  }
  if (wanted.weight) {
    result.weight =
        at::sum_to(grad * normalized, weight.sizes()).to(weight.scalar_type());
  }
  if (wanted.bias) {
    result.bias = at::sum_to(grad, bias_sizes);
  }
  return result;
}

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

/// This rank's terms.
struct LocalSums {
  Tensor sum; // of the weighted gradient, per statistic
  Tensor product; // of that times the normalized value
  Tensor weight; // gradients of weight and bias, with x's dims
  Tensor bias;
};

/// Where weight and bias are constant along `inner`: sums over these first.
LocalSums sums_by_cell(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const Statistics& statistics,
    const std::vector<int64_t>& inner,
    const NormGeometry& geometry) {
  auto sums = zeros_like_statistic(x, inner);
  auto products = zeros_like_statistic(x, inner);
  visit_pieces(
      {x, grad, sums, products, statistics.mean},
      [&](const std::vector<Tensor>& piece) {
        const auto grad_wide = wide(piece[1]);
        piece[2].add_(kept_sum(grad_wide, inner));
        auto product = piece[4].defined() ? wide(piece[0]) - piece[4]
                                          : wide(piece[0]).clone();
        piece[3].add_(kept_sum(product.mul_(grad_wide), inner));
      });
  products.mul_(statistics.rstd);
  const auto weighted = [&](const Tensor& cells) {
    return kept_sum(weight.defined() ? cells * weight : cells, geometry.dims);
  };
  return {weighted(sums), weighted(products), products, sums};
}

/// Where they vary with every element of a statistic.
LocalSums sums_by_element(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const Statistics& statistics,
    const std::vector<int64_t>& outer,
    const NormGeometry& geometry) {
  const LocalSums result{
      zeros_like_statistic(x, geometry.dims),
      zeros_like_statistic(x, geometry.dims),
      zeros_like_statistic(x, outer),
      zeros_like_statistic(x, outer)};
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
        auto product = piece[2].defined() ? wide(piece[0]) - piece[2]
                                          : wide(piece[0]).clone();
        product.mul_(piece[3]).mul_(g);
        piece[7].add_(kept_sum(product, outer));
        piece[8].add_(kept_sum(g, outer));
        piece[6].add_(
            kept_sum(w.defined() ? product.mul_(w) : product, geometry.dims));
        piece[5].add_(kept_sum(w.defined() ? g * w : g, geometry.dims));
      });
  return result;
}

/// The gradient of x from the sums over all ranks.
Tensor input_gradient(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const Statistics& statistics,
    const LocalSums& sums,
    const NormGeometry& geometry) {
  const at::Scalar count(static_cast<double>(geometry.count));
  const auto [sum, product] = total_pair(sums.sum, sums.product, geometry);
  const bool folds = folds_into(weight, statistics.rstd, x);
  const auto result = at::empty_like(x);
  visit_pieces(
      {x,
       grad,
       result,
       statistics.mean,
       at::square(statistics.rstd) * (product / count).neg(),
       geometry.centered ? statistics.rstd * (sum / count) : Tensor(),
       folds ? statistics.rstd * weight : statistics.rstd,
       folds ? Tensor() : weight},
      [](const std::vector<Tensor>& piece) {
        auto dx = deviation(piece[0], piece[3], piece[2]);
        dx.mul_(piece[4]);
        if (piece[5].defined()) {
          dx.sub_(piece[5]);
        }
        auto scaled = wide(piece[1]) * piece[6];
        dx.add_(piece[7].defined() ? scaled.mul_(piece[7]) : scaled);
        store(dx, piece[2]);
      });
  return result;
}

/// The same numbers with few passes and no temporary but the result.
Gradients fused_gradients(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    const std::vector<int64_t>& bias_sizes,
    const Statistics& statistics,
    const Wanted& wanted,
    const NormGeometry& geometry) {
  const auto w = with_dims(weight, x.dim());
  const auto [inner, outer] = constant_dims(x, weight, bias_sizes, geometry);
  const auto sums = inner.empty()
      ? sums_by_element(grad, x, w, statistics, outer, geometry)
      : sums_by_cell(grad, x, w, statistics, inner, geometry);
  Gradients result;
  if (wanted.x) {
    result.x = input_gradient(grad, x, w, statistics, sums, geometry);
  }
  if (wanted.weight) {
    result.weight =
        at::sum_to(sums.weight, weight.sizes()).to(weight.scalar_type());
  }
  if (wanted.bias) {
    result.bias = at::sum_to(sums.bias, bias_sizes);
  }
  return result;
}

struct NormBackward : Node {
  NormBackward(
      const Tensor& x,
      const Tensor& weight,
      const Tensor& bias,
      const Statistics& statistics,
      double eps,
      NormGeometry geometry)
      : x_(x, false),
        weight_(weight, false),
        statistics_(statistics),
        eps_(eps),
        bias_dtype_(bias.defined() ? bias.scalar_type() : at::kFloat),
        geometry_(std::move(geometry)) {
    if (bias.defined()) {
      bias_sizes_ = bias.sizes().vec();
    }
  }
  std::string name() const override {
    return "ShardTensorNormBackward";
  }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    weight_.reset_data();
    statistics_ = {};
  }
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return variable_list(3);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto x = x_.unpack();
    const auto weight = weight_.unpack();
    const Wanted wanted{
        task_should_compute_output(0),
        task_should_compute_output(1),
        task_should_compute_output(2)};
    const CommScope scope("backward of a norm");
    const auto result = at::GradMode::is_enabled()
        ? composed_gradients(
              grads[0],
              x,
              weight,
              bias_sizes_,
              differentiable_statistics(x, eps_, geometry_),
              wanted,
              geometry_)
        : fused_gradients(
              grads[0], x, weight, bias_sizes_, statistics_, wanted, geometry_);
    return {
        result.x,
        result.weight,
        result.bias.defined() ? result.bias.to(bias_dtype_) : result.bias};
  }

  SavedVariable x_;
  SavedVariable weight_;
  Statistics statistics_;
  double eps_;
  std::vector<int64_t> bias_sizes_;
  at::ScalarType bias_dtype_;
  NormGeometry geometry_;
};

} // namespace

Tensor normalize(
    const Tensor& x,
    const Tensor& weight,
    const Tensor& bias,
    const NormMoments& moments,
    double eps,
    const NormGeometry& geometry) {
  for (const auto& input : {x, weight, bias}) {
    if (input.defined()) {
      check_no_tangent(input);
    }
  }
  const auto statistics = statistics_of(moments, eps, geometry);
  Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = apply_norm(x, weight, bias, statistics);
  }
  if (needs_node(x) || needs_node(weight) || needs_node(bias)) {
    auto node =
        make_node<NormBackward>(x, weight, bias, statistics, eps, geometry);
    node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
    torch::autograd::set_history(result, node);
  }
  return result;
}

} // namespace shardtensor
