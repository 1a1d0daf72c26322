#include "shardtensor/rules/neighborhood/by_windows.h"

#include <algorithm>

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/rules/attention/merge.h"
#include "shardtensor/rules/neighborhood/device_table.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

// Of copied keys. For each part a device is given some 20 kernels.
constexpr int64_t kElementsAtATime = int64_t{1} << 22;
constexpr int64_t kElementsOnDevice = int64_t{1} << 25;

/// The cells of some queries' keys, (queries, window), and which of them a
/// query does not see, where a causal window ends earlier.
struct Windows {
  Tensor cells;
  Tensor unseen; // undefined: none
};

/// Of all queries along one dim.
struct WindowsOfDim {
  Windows windows;
  int64_t keys = 0; // that the piece holds
};

WindowsOfDim make_windows(const NeighborhoodDim& dim, at::Device device) {
  const LocalWindows windows(dim);
  std::vector<int64_t> cells;
  std::vector<uint8_t> unseen;
  for (int64_t query = 0; query < windows.queries(); ++query) {
    for (int64_t i = 0; i < dim.kernel; ++i) {
      const bool sees = i < windows.count(query);
      cells.push_back(windows.key(query, sees ? i : 0));
      unseen.push_back(sees ? 0 : 1);
    }
  }
  const std::vector<int64_t> sizes{windows.queries(), dim.kernel};
  return {
      {device_table(cells, sizes, device), device_table(unseen, sizes, device)},
      windows.keys()};
}

/// Kept on the device: each copy from the host would wait for it.
std::shared_ptr<const WindowsOfDim> windows_of(
    const NeighborhoodDim& dim,
    at::Device device) {
  static PlanCache<WindowsOfDim> tables;
  PlanKey key;
  key.add(encode({dim}))
      .add(static_cast<int64_t>(device.type()))
      .add(static_cast<int64_t>(device.index()));
  return tables.find(key, [&] { return make_windows(dim, device); });
}

/// What is found along a dim, with what is found along the dims after it.
Windows around(
    const Windows& outer,
    const Windows& inner,
    int64_t inner_cells) {
  const auto each_with_each = [](const Tensor& a, const Tensor& b) {
    return (a.unsqueeze(2) + b.unsqueeze(1)).flatten(1);
  };
  return {
      each_with_each(outer.cells * inner_cells, inner.cells),
      each_with_each(outer.unseen, inner.unseen)};
}

/// Of queries [begin, end) of the piece, in row-major order.
Windows find_windows(
    const std::vector<NeighborhoodDim>& dims,
    Interval queries,
    at::Device device) {
  const OnPlainTensors plain;
  const auto numbers = at::TensorOptions(device).dtype(at::kLong);
  auto rest = at::arange(queries.begin, queries.end, numbers);
  Windows found{
      at::zeros({queries.extent(), 1}, numbers),
      at::zeros({queries.extent(), 1}, numbers.dtype(at::kByte))};
  int64_t cells = 1;
  bool causal = false;
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    const auto extent = std::max<int64_t>(dim->queries.extent(), 1);
    const auto own = rest.remainder(extent);
    const auto of_dim = windows_of(*dim, device);
    found = around(
        {of_dim->windows.cells.index_select(0, own),
         of_dim->windows.unseen.index_select(0, own)},
        found,
        cells);
    rest = rest.floor_divide(extent);
    cells *= of_dim->keys;
    causal = causal || dim->causal;
  }
  found.unseen = causal ? found.unseen.to(at::kBool) : Tensor();
  return found;
}

int64_t count_queries(const std::vector<NeighborhoodDim>& dims) {
  int64_t count = 1;
  for (const auto& dim : dims) {
    count *= dim.queries.extent();
  }
  return count;
}

int64_t window_size(const std::vector<NeighborhoodDim>& dims) {
  int64_t size = 1;
  for (const auto& dim : dims) {
    size *= dim.kernel;
  }
  return size;
}

/// (batch, heads, cells, features), in the type of the arithmetic: products of
/// windows copy nothing then.
Tensor with_cells(const Tensor& x) {
  return x.to(at::toOpMathType(x.scalar_type()))
      .flatten(1, -3)
      .transpose(1, 2)
      .contiguous();
}

/// With the sizes and the type of x, perhaps other features.
Tensor without_cells(const Tensor& cells, const Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes.back() = cells.size(-1);
  return cells.transpose(1, 2).reshape(sizes).to(x.scalar_type());
}

/// (batch, heads, queries, window, features).
Tensor in_windows(const Tensor& cells, const Windows& windows) {
  return cells.index_select(2, windows.cells.flatten())
      .unflatten(2, windows.cells.sizes());
}

/// The adjoint of in_windows: each copy is added to its cell.
Tensor from_windows(
    const Tensor& copies,
    const Windows& windows,
    const Tensor& like) {
  return at::index_add(
      at::zeros(like.sizes(), like.options()),
      2,
      windows.cells.flatten(),
      copies.flatten(2, 3));
}

/// (batch, heads, queries, window) of (batch, heads, queries, features).
Tensor scores_of(
    const Tensor& query,
    const Tensor& key_windows,
    const Windows& windows,
    double scale) {
  const auto scores =
      at::matmul(key_windows, query.unsqueeze(-1)).squeeze(-1) * scale;
  return windows.unseen.defined() ? scores.masked_fill(windows.unseen, kUnseen)
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
  const int64_t count = count_queries(dims);
  const int64_t width = window_size(dims);
  const int64_t elements = query.size(0) * query.size(1) * width *
      std::max(query.size(-1), value.size(-1));
  const auto most = query.is_cpu() ? kElementsAtATime : kElementsOnDevice;
  const int64_t step = in_parts
      ? std::max<int64_t>(most / std::max<int64_t>(elements, 1), 1)
      : std::max<int64_t>(count, 1);
  int64_t begin = 0;
  do {
    const Interval queries{begin, std::min(begin + step, count)};
    visit(find_windows(dims, queries, query.device()), queries);
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
        q.narrow(2, queries.begin, queries.extent()),
        in_windows(k, windows),
        windows,
        scale);
    outputs.push_back(weigh(at::softmax(scores, -1), in_windows(v, windows)));
    log_sums.push_back(at::logsumexp(scores, -1));
  };
  visit_queries(q, v, dims, in_parts, visit);
  const auto log_sum = at::cat(log_sums, 2).transpose(1, 2);
  return {
      without_cells(at::cat(outputs, 2), query),
      log_sum.reshape(query.sizes().slice(0, query.dim() - 1))};
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
    const auto q_part = q.narrow(2, queries.begin, queries.extent());
    const auto g_part = g.narrow(2, queries.begin, queries.extent());
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
  return {
      without_cells(at::cat(of_queries, 2), query),
      without_cells(of_keys, key),
      without_cells(of_values, value)};
}

} // namespace shardtensor::detail
