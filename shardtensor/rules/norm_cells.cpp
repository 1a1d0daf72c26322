#include "shardtensor/rules/norm_cells.h"

#include <algorithm>
#include <array>

#include <ATen/Dispatch.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor {

using at::Tensor;
using Cell = std::vector<int64_t>;

namespace {

constexpr int64_t kShortest = 64; // elements of a cell worth a call
constexpr int64_t kRun = 2048; // elements that stay in the first cache
constexpr int64_t kLanes = 16; // sums side by side, for the vector units
constexpr int64_t kGrain = 32768; // elements worth a thread

// ---- cells ------------------------------------------------------------------

/// The first element of each cell.
Tensor first_elements(const Tensor& x, const Cell& cell) {
  auto sizes = x.sizes().vec();
  for (const int64_t dim : cell) {
    sizes[dim] = 1;
  }
  return x.as_strided(sizes, x.strides(), x.storage_offset());
}

Tensor per_cell(const Tensor& x, const Cell& cell) {
  return at::empty_like(first_elements(x, cell), at::MemoryFormat::Contiguous);
}

/// What is known of each cell, in x's dtype; zero if undefined.
Tensor known(const Tensor& tensor, const Tensor& x) {
  return tensor.defined() ? tensor.to(x.scalar_type())
                          : at::zeros({1}, x.options());
}

/// Calls visit(pointers) for each cell, with a pointer into each tensor: to
/// what it says of this cell, or to the cell's first element. PyTorch's threads
/// share the cells.
template <class T, size_t kTensors, class Visit>
void visit_cells(
    const std::array<Tensor, kTensors>& tensors,
    int64_t outputs,
    int64_t length,
    const Visit& visit) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).resize_outputs(false);
  for (size_t i = 0; i < kTensors; ++i) {
    if (static_cast<int64_t>(i) < outputs) {
      config.add_output(tensors[i]);
    } else {
      config.add_const_input(tensors[i]);
    }
  }
  const auto visit_grid =
      [&](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
        std::array<T*, kTensors> at;
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t column = 0; column < columns; ++column) {
            for (size_t i = 0; i < kTensors; ++i) {
              at[i] = reinterpret_cast<T*>(
                  data[i] + column * strides[i] + row * strides[kTensors + i]);
            }
            visit(at);
          }
        }
      };
  config.build().for_each(visit_grid, std::max<int64_t>(kGrain / length, 1));
}

// ---- one cell ---------------------------------------------------------------

/// The sum of term(i) for i < count.
template <class T, class Term>
double sum_terms(int64_t count, const Term& term) {
  T lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += term(i + lane);
    }
  }
  double sum = 0;
  for (const T lane : lanes) {
    sum += lane;
  }
  for (; i < count; ++i) {
    sum += term(i);
  }
  return sum;
}

/// Run by run, merged as Chan, Golub and LeVeque (1979) merge samples.
template <class T>
void moments_of(const T* x, int64_t length, T& mean, T& squares) {
  double total_mean = 0;
  double total_squares = 0;
  for (int64_t begin = 0; begin < length; begin += kRun) {
    const T* const run = x + begin;
    const auto count = std::min(kRun, length - begin);
    const double run_mean =
        sum_terms<T>(count, [&](int64_t i) { return run[i]; }) /
        static_cast<double>(count);
    const T shift = static_cast<T>(run_mean);
    const double run_squares = sum_terms<T>(count, [&](int64_t i) {
      const T deviation = run[i] - shift;
      return deviation * deviation;
    });
    const double weight =
        static_cast<double>(count) / static_cast<double>(begin + count);
    const double step = run_mean - total_mean;
    total_mean += step * weight;
    total_squares +=
        run_squares + step * step * weight * static_cast<double>(begin);
  }
  mean = static_cast<T>(total_mean);
  squares = static_cast<T>(total_squares);
}

template <class T>
void sums_of(
    const T* x,
    T mean,
    const T* y,
    int64_t length,
    T& values,
    T& products) {
  double total_values = 0;
  double total_products = 0;
  for (int64_t begin = 0; begin < length; begin += kRun) {
    const T* const x_run = x + begin;
    const T* const y_run = y + begin;
    const auto count = std::min(kRun, length - begin);
    total_values += sum_terms<T>(count, [&](int64_t i) { return y_run[i]; });
    total_products += sum_terms<T>(
        count, [&](int64_t i) { return y_run[i] * (x_run[i] - mean); });
  }
  values = static_cast<T>(total_values);
  products = static_cast<T>(total_products);
}

} // namespace

// ---- passes -----------------------------------------------------------------

std::optional<Cell> cell_dims(
    const std::vector<Tensor>& tensors,
    const std::vector<int64_t>& constant) {
  const auto& x = tensors[0];
  for (const auto& tensor : tensors) {
    if (!tensor.is_cpu() || is_traced(tensor) ||
        tensor.scalar_type() != x.scalar_type() ||
        (tensor.scalar_type() != at::kFloat &&
         tensor.scalar_type() != at::kDouble)) {
      return std::nullopt;
    }
  }
  Cell cell;
  int64_t length = 1;
  for (int64_t dim = x.dim() - 1; dim >= 0; --dim) {
    const bool fits =
        std::binary_search(constant.begin(), constant.end(), dim) &&
        std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& tensor) {
          return tensor.size(dim) == 1 || tensor.stride(dim) == length;
        });
    if (!fits) {
      break;
    }
    cell.insert(cell.begin(), dim);
    length *= x.size(dim);
  }
  return length < kShortest ? std::nullopt : std::optional(cell);
}

Moments cell_moments(const Tensor& x, const Cell& cell) {
  const auto length = count_over(x.sizes(), cell);
  const Moments result{per_cell(x, cell), per_cell(x, cell)};
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "cell_moments", [&] {
    visit_cells<scalar_t>(
        std::array{result.mean, result.squares, first_elements(x, cell)},
        2,
        length,
        [&](const auto& at) { moments_of(at[2], length, *at[0], *at[1]); });
  });
  return result;
}

CellSums cell_sums(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& y,
    const Cell& cell) {
  const auto length = count_over(x.sizes(), cell);
  const CellSums result{per_cell(x, cell), per_cell(x, cell)};
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "cell_sums", [&] {
    visit_cells<scalar_t>(
        std::array{
            result.values,
            result.products,
            first_elements(x, cell),
            first_elements(y, cell),
            known(mean, x)},
        2,
        length,
        [&](const auto& at) {
          sums_of(at[2], *at[4], at[3], length, *at[0], *at[1]);
        });
  });
  return result;
}

Tensor scale_cells(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& scale,
    const Tensor& bias,
    const Cell& cell) {
  const auto length = count_over(x.sizes(), cell);
  auto result = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "scale_cells", [&] {
    visit_cells<scalar_t>(
        std::array{
            first_elements(result, cell),
            first_elements(x, cell),
            known(mean, x),
            known(scale, x),
            known(bias, x)},
        1,
        length,
        [&](const auto& at) {
          scalar_t* __restrict to = at[0];
          const scalar_t* __restrict from = at[1];
          const scalar_t m = *at[2];
          const scalar_t s = *at[3];
          const scalar_t b = *at[4];
          for (int64_t i = 0; i < length; ++i) {
            to[i] = (from[i] - m) * s + b;
          }
        });
  });
  return result;
}

Tensor combine_cells(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& scale,
    const Tensor& y,
    const Tensor& scale_y,
    const Tensor& bias,
    const Cell& cell) {
  const auto length = count_over(x.sizes(), cell);
  auto result = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "combine_cells", [&] {
    visit_cells<scalar_t>(
        std::array{
            first_elements(result, cell),
            first_elements(x, cell),
            first_elements(y, cell),
            known(mean, x),
            known(scale, x),
            known(scale_y, x),
            known(bias, x)},
        1,
        length,
        [&](const auto& at) {
          scalar_t* __restrict to = at[0];
          const scalar_t* __restrict from_x = at[1];
          const scalar_t* __restrict from_y = at[2];
          const scalar_t m = *at[3];
          const scalar_t s = *at[4];
          const scalar_t t = *at[5];
          const scalar_t b = *at[6];
          for (int64_t i = 0; i < length; ++i) {
            to[i] = (from_x[i] - m) * s + from_y[i] * t + b;
          }
        });
  });
  return result;
}

} // namespace shardtensor
