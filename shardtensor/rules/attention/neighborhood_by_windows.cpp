#include "shardtensor/rules/attention/neighborhood_by_windows.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/rules/attention/merge.h"
#include "shardtensor/rules/attention/neighborhood_loops.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

constexpr int64_t kElementsAtATime = int64_t{1} << 22; // of copied keys

/// A plain tensor, also under torch.func, whose factories give wrapped ones.
template <class Number>
Tensor table(
    std::vector<Number>& numbers,
    at::IntArrayRef sizes,
    at::Device device) {
  const auto type = c10::CppTypeToScalarType<Number>::value;
  return at::from_blob(numbers.data(), sizes, type)
      .to(device, type, false, true);
}

/// For queries [begin, end) of the piece, its cells in row-major order, the
/// cells of their keys, (queries, window), and where a causal window ends
/// earlier.
struct Windows {
  Tensor cells;
  Tensor unseen; // undefined: none
};

NeighborhoodPiece piece_of(const std::vector<NeighborhoodDim>& dims) {
  NeighborhoodPiece piece;
  for (const auto& dim : dims) {
    piece.dims.emplace_back(dim);
  }
  while (piece.dims.size() < 3) {
    piece.dims.emplace_back(NeighborhoodDim());
  }
  return piece;
}

int64_t window_size(const std::vector<NeighborhoodDim>& dims) {
  int64_t size = 1;
  for (const auto& dim : dims) {
    size *= dim.kernel;
  }
  return size;
}

Windows find_windows(
    const NeighborhoodPiece& piece,
    int64_t width,
    Interval queries,
    at::Device device) {
  std::vector<int64_t> cells;
  std::vector<int64_t> found;
  std::vector<uint8_t> unseen;
  const Interval rows{0, piece.dims[0].keys()};
  for (int64_t query = queries.begin; query < queries.end; ++query) {
    piece.find_keys(query, rows, found);
    const auto missing = width - static_cast<int64_t>(found.size());
    unseen.resize(unseen.size() + found.size(), 0);
    unseen.resize(unseen.size() + missing, 1);
    found.resize(width, 0);
    cells.insert(cells.end(), found.begin(), found.end());
  }
  const std::vector<int64_t> sizes{queries.extent(), width};
  Windows windows{table(cells, sizes, device), {}};
  if (std::find(unseen.begin(), unseen.end(), 1) != unseen.end()) {
    windows.unseen = table(unseen, sizes, device).to(at::kBool);
  }
  return windows;
}

/// (batch, cells, heads, features), in the type of the arithmetic.
Tensor with_cells(const Tensor& x) {
  return x.to(at::toOpMathType(x.scalar_type())).flatten(1, -3);
}

/// (batch, queries, heads, window, features).
Tensor in_windows(const Tensor& cells, const Windows& windows) {
  auto sizes = cells.sizes().vec();
  sizes[1] = windows.cells.size(0);
  sizes.insert(sizes.begin() + 2, windows.cells.size(1));
  return cells.index_select(1, windows.cells.flatten())
      .view(sizes)
      .transpose(2, 3);
}

/// The adjoint of in_windows: each copy is added to its cell.
Tensor from_windows(
    const Tensor& copies,
    const Windows& windows,
    const Tensor& like) {
  return at::index_add(
      at::zeros(like.sizes(), like.options()),
      1,
      windows.cells.flatten(),
      copies.transpose(2, 3).flatten(1, 2));
}

/// (batch, queries, heads, window) of (batch, queries, heads, features).
Tensor scores_of(
    const Tensor& query,
    const Tensor& key_windows,
    const Windows& windows,
    double scale) {
  const auto scores =
      at::matmul(key_windows, query.unsqueeze(-1)).squeeze(-1) * scale;
  return windows.unseen.defined()
      ? scores.masked_fill(windows.unseen.unsqueeze(1), kUnseen)
      : scores;
}

Tensor weigh(const Tensor& weights, const Tensor& rows) {
  return at::matmul(weights.unsqueeze(-2), rows).squeeze(-2);
}

/// Calls visit(windows, queries) for all queries, or some at a time.
template <class Visit>
void visit_queries(
    const Tensor& query,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    bool in_parts,
    const Visit& visit) {
  const auto piece = piece_of(dims);
  const int64_t count = piece.queries();
  const int64_t width = window_size(dims);
  const int64_t elements = query.size(0) * query.size(-2) * width *
      std::max(query.size(-1), value.size(-1));
  const int64_t step = in_parts
      ? std::max<int64_t>(kElementsAtATime / std::max<int64_t>(elements, 1), 1)
      : std::max<int64_t>(count, 1);
  int64_t begin = 0;
  do {
    const Interval queries{begin, std::min(begin + step, count)};
    visit(find_windows(piece, width, queries, query.device()), queries);
    begin = queries.end;
  } while (begin < count);
}

} // namespace

NeighborhoodOutput attend_windows(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale,
    bool in_parts) {
  const auto q = with_cells(query);
  const auto k = with_cells(key);
  const auto v = with_cells(value);
  std::vector<Tensor> outputs;
  std::vector<Tensor> log_sums;
  const auto visit = [&](const Windows& windows, Interval queries) {
    const auto scores = scores_of(
        q.narrow(1, queries.begin, queries.extent()),
        in_windows(k, windows),
        windows,
        scale);
    outputs.push_back(weigh(at::softmax(scores, -1), in_windows(v, windows)));
    log_sums.push_back(at::logsumexp(scores, -1));
  };
  visit_queries(q, v, dims, in_parts, visit);
  auto sizes = query.sizes().vec();
  sizes.pop_back();
  const auto log_sum = at::cat(log_sums, 1).view(sizes);
  sizes.push_back(value.size(-1));
  return {at::cat(outputs, 1).view(sizes).to(query.scalar_type()), log_sum};
}

std::tuple<Tensor, Tensor, Tensor> attend_windows_backward(
    const Tensor& grad,
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::vector<NeighborhoodDim>& dims,
    double scale,
    bool in_parts) {
  const auto g = with_cells(grad);
  const auto q = with_cells(query);
  const auto k = with_cells(key);
  const auto v = with_cells(value);
  std::vector<Tensor> of_queries;
  Tensor of_keys;
  Tensor of_values;
  const auto add = [](Tensor& sum, const Tensor& term) {
    sum = sum.defined() ? sum + term : term;
  };
  const auto visit = [&](const Windows& windows, Interval queries) {
    const auto q_part = q.narrow(1, queries.begin, queries.extent());
    const auto g_part = g.narrow(1, queries.begin, queries.extent());
    const auto keys = in_windows(k, windows);
    const auto weights =
        at::softmax(scores_of(q_part, keys, windows, scale), -1);
    const auto changes =
        at::matmul(in_windows(v, windows), g_part.unsqueeze(-1)).squeeze(-1);
    const auto mean = (weights * changes).sum(-1, /*keepdim=*/true);
    const auto of_scores = weights * (changes - mean) * scale;
    of_queries.push_back(weigh(of_scores, keys));
    add(of_keys,
        from_windows(
            of_scores.unsqueeze(-1) * q_part.unsqueeze(-2), windows, k));
    add(of_values,
        from_windows(weights.unsqueeze(-1) * g_part.unsqueeze(-2), windows, v));
  };
  visit_queries(q, v, dims, in_parts, visit);
  const auto type = query.scalar_type();
  return {
      at::cat(of_queries, 1).view(query.sizes()).to(type),
      of_keys.view(key.sizes()).to(type),
      of_values.view(value.sizes()).to(type)};
}

} // namespace shardtensor::detail
