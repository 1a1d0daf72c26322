#include "shardtensor/rules/neighborhood/kernel.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/rules/neighborhood/loops.h"
#include "shardtensor/threads/parallel_for.h"

// The loops below are compiled twice, and the machine chooses. Sanitizers don't
// take functions that are chosen while a program is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define SHARDTENSOR_CLONES \
  __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define SHARDTENSOR_CLONES
#endif

namespace shardtensor::detail {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 16384; // products of features worth a thread

// ---- one loop per type ------------------------------------------------------

#define SHARDTENSOR_LOOPS(T)                                                  \
  SHARDTENSOR_CLONES void run_queries(                                        \
      const NeighborhoodPiece& piece,                                         \
      const FeatureRows<const T>& query,                                      \
      const FeatureRows<const T>& key,                                        \
      const FeatureRows<const T>& value,                                      \
      const FeatureRows<T>& output,                                           \
      const FeatureRows<T>& log_sum,                                          \
      int64_t begin,                                                          \
      int64_t end) {                                                          \
    attend_queries<T>(piece, query, key, value, output, log_sum, begin, end); \
  }                                                                           \
  SHARDTENSOR_CLONES void run_queries_backward(                               \
      const NeighborhoodPiece& piece,                                         \
      const GradientRows<T>& all,                                             \
      int64_t batch,                                                          \
      Interval heads,                                                         \
      Interval queries,                                                       \
      Interval rows) {                                                        \
    attend_queries_backward<T>(piece, all, batch, heads, queries, rows);      \
  }
SHARDTENSOR_LOOPS(float)
SHARDTENSOR_LOOPS(double)
#undef SHARDTENSOR_LOOPS

// ---- tensors as rows --------------------------------------------------------

/// The innermost dim of cells with more than one of them, which says how far
/// apart they are. `trailing` dims come after the cells.
int64_t dim_of_cells(const Tensor& x, int64_t trailing) {
  int64_t dim = x.dim() - trailing - 1;
  while (dim > 1 && x.size(dim) <= 1) {
    --dim;
  }
  return dim;
}

/// In the type of the arithmetic, with features side by side and cells at even
/// distances in row-major order: (batch, dims..., heads, features).
Tensor with_even_cells(const Tensor& given) {
  const auto x = given.to(at::toOpMathType(given.scalar_type()));
  bool even = x.size(-1) <= 1 || x.stride(-1) == 1;
  int64_t dim = dim_of_cells(x, /*trailing=*/2);
  for (int64_t cell = x.stride(dim); dim >= 1; --dim) {
    even = even && (x.size(dim) <= 1 || x.stride(dim) == cell);
    cell *= x.size(dim);
  }
  return even ? x : x.contiguous();
}

template <class T>
FeatureRows<T> rows_of(const Tensor& x, int64_t trailing = 2) {
  return {
      x.data_ptr<std::remove_const_t<T>>(),
      x.stride(0),
      x.stride(dim_of_cells(x, trailing)),
      x.stride(x.dim() - trailing)};
}

NeighborhoodPiece piece_of(
    const Tensor& query,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale) {
  NeighborhoodPiece piece{
      {}, query.size(0), query.size(-2), query.size(-1), value.size(-1), scale};
  for (const auto& dim : dims) {
    piece.dims.emplace_back(dim);
  }
  while (piece.dims.size() < 3) {
    piece.dims.emplace_back(NeighborhoodDim());
  }
  return piece;
}

int64_t products_per_query(
    const NeighborhoodPiece& piece,
    const std::vector<NeighborhoodDim>& dims) {
  int64_t products = piece.heads * (piece.features + piece.value_features);
  for (const auto& dim : dims) {
    products *= dim.kernel;
  }
  return std::max<int64_t>(products, 1);
}

// ---- backward ---------------------------------------------------------------

/// Threads share batches and heads: none adds to a key's gradient that another
/// adds to.
template <class T>
void share_heads(
    const NeighborhoodPiece& piece,
    const GradientRows<T>& all,
    int64_t threads) {
  const int64_t parts = std::min<int64_t>(
      piece.heads, (threads + piece.batches - 1) / piece.batches);
  const Interval rows{0, piece.dims[0].keys()};
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i % parts;
      const Interval heads{
          part * piece.heads / parts, (part + 1) * piece.heads / parts};
      run_queries_backward(
          piece, all, i / parts, heads, {0, piece.queries()}, rows);
    }
  };
  parallel_for(piece.batches * parts, 1, run);
}

/// With few heads threads share queries, and then once more rows of keys.
template <class T>
void share_rows(const NeighborhoodPiece& piece, const GradientRows<T>& all) {
  const Interval heads{0, piece.heads};
  const Interval every{0, piece.dims[0].keys()};
  auto of_queries = all;
  of_queries.of_key.data = nullptr;
  auto of_keys = all;
  of_keys.of_query.data = nullptr;
  for (int64_t batch = 0; batch < piece.batches; ++batch) {
    parallel_for(piece.queries(), 1, [&](int64_t begin, int64_t end) {
      run_queries_backward(
          piece, of_queries, batch, heads, {begin, end}, every);
    });
    parallel_for(every.end, 1, [&](int64_t begin, int64_t end) {
      run_queries_backward(
          piece, of_keys, batch, heads, {0, piece.queries()}, {begin, end});
    });
  }
}

} // namespace

NeighborhoodOutput empty_neighborhood_output(
    const Tensor& query,
    const Tensor& value) {
  const auto type = at::toOpMathType(query.scalar_type());
  auto sizes = query.sizes().vec();
  sizes.back() = value.size(-1);
  const auto output = at::empty(sizes, query.options().dtype(type));
  sizes.pop_back();
  return {output, at::empty(sizes, output.options())};
}

void attend_neighborhood_into(
    const NeighborhoodOutput& to,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale) {
  if (to.output.numel() == 0) {
    to.log_sum.zero_();
    return;
  }
  const auto q = with_even_cells(query);
  const auto k = with_even_cells(key);
  const auto v = with_even_cells(value);
  const auto piece = piece_of(q, v, dims, scale);
  const int64_t grain =
      std::max<int64_t>(kGrain / products_per_query(piece, dims), 1);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "neighborhood_attention", [&] {
    const auto run = [&](int64_t begin, int64_t end) {
      run_queries(
          piece,
          rows_of<const scalar_t>(q),
          rows_of<const scalar_t>(k),
          rows_of<const scalar_t>(v),
          rows_of<scalar_t>(to.output),
          rows_of<scalar_t>(to.log_sum, 1),
          begin,
          end);
    };
    parallel_for(piece.batches * piece.queries(), grain, run);
  });
}

NeighborhoodOutput attend_neighborhood(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale) {
  const auto attended = empty_neighborhood_output(query, value);
  attend_neighborhood_into(attended, query, key, value, dims, scale);
  return {attended.output.to(query.scalar_type()), attended.log_sum};
}

NeighborhoodGradients zero_gradients(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value) {
  const auto type = at::toOpMathType(query.scalar_type());
  const auto options = query.options().dtype(type);
  return {
      at::zeros(query.sizes(), options),
      at::zeros(key.sizes(), options),
      at::zeros(value.sizes(), options)};
}

void attend_neighborhood_backward_onto(
    const NeighborhoodGradients& to,
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const NeighborhoodOutput& attended,
    const std::vector<NeighborhoodDim>& dims,
    double scale) {
  if (attended.log_sum.numel() == 0) {
    return;
  }
  const auto g = with_even_cells(grad);
  const auto q = with_even_cells(query);
  const auto k = with_even_cells(key);
  const auto v = with_even_cells(value);
  const auto output = with_even_cells(attended.output);
  const auto piece = piece_of(q, v, dims, scale);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "neighborhood_attention", [&] {
    const GradientRows<scalar_t> all{
        rows_of<const scalar_t>(g),
        rows_of<const scalar_t>(q),
        rows_of<const scalar_t>(k),
        rows_of<const scalar_t>(v),
        rows_of<const scalar_t>(output),
        rows_of<const scalar_t>(attended.log_sum, 1),
        rows_of<scalar_t>(to.query),
        rows_of<scalar_t>(to.key),
        rows_of<scalar_t>(to.value)};
    const int64_t threads = at::get_num_threads();
    if (piece.batches * piece.heads >= threads) {
      share_heads(piece, all, threads);
    } else {
      share_rows(piece, all);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> attend_neighborhood_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const NeighborhoodOutput& attended,
    const std::vector<NeighborhoodDim>& dims,
    double scale) {
  const auto type = query.scalar_type();
  const auto gradients = zero_gradients(query, key, value);
  const NeighborhoodOutput kept{attended.output, attended.log_sum.contiguous()};
  attend_neighborhood_backward_onto(
      gradients, grad, query, key, value, kept, dims, scale);
  const auto& [dq, dk, dv] = gradients;
  return {dq.to(type), dk.to(type), dv.to(type)};
}

} // namespace shardtensor::detail
