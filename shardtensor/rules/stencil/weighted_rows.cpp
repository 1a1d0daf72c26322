// The loops go through x as (outer, rows, inner) in blocks of outputs, or in
// backward of rows: the weights of a block's outputs are found once and serve
// all of outer. Sums are in the type in which PyTorch's kernels on the CPU add.
#include "shardtensor/rules/stencil/weighted_rows.h"

#include <algorithm>
#include <optional>

#include <ATen/AccumulateType.h>
#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_add.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/rules/stencil/plan_tensors.h"
#include "shardtensor/tensor/gradients/linear_map.h"
#include "shardtensor/tensor/shard_tensor_impl.h"
#include "shardtensor/threads/parallel_for.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using Kind = WeightedRows::Kind;

// ---- what an output reads ---------------------------------------------------

/// scale * sum of weights[j] * rows[j]; an average has no weights, and rows
/// that follow each other from `first` on.
struct OutputRows {
  Taps taps;
  int64_t first = 0;
  int64_t count = 0;
  double scale = 1;

  int64_t row(int64_t j) const {
    return taps.rows.empty() ? first + j : taps.rows[j] - first;
  }
  double weight(int64_t j) const {
    return taps.weights.empty() ? 1 : taps.weights[j];
  }
};

/// Of output i of the piece, in local rows.
void find_rows(const WeightedRows& plan, int64_t i, OutputRows& found) {
  const int64_t o = plan.outputs.begin + i;
  if (plan.kind == Kind::Averages) {
    const auto read = plan.stencil.reads(o).shifted(-plan.rows.begin);
    found.first = read.begin;
    found.count = read.extent();
    found.scale = 1 / static_cast<double>(std::max<int64_t>(found.count, 1));
    return;
  }
  plan.stencil.find_taps(o, found.taps);
  found.first = plan.rows.begin;
  found.count = static_cast<int64_t>(found.taps.rows.size());
}

/// Those of a few outputs at a time.
class OutputBlock {
 public:
  void find(const WeightedRows& plan, const Interval& outputs) {
    begin_ = outputs.begin;
    const auto extent = static_cast<size_t>(outputs.extent());
    all_.resize(std::max(all_.size(), extent));
    for (size_t i = 0; i < extent; ++i) {
      find_rows(plan, begin_ + static_cast<int64_t>(i), all_[i]);
    }
  }
  const OutputRows& operator[](int64_t output) const {
    return all_[output - begin_];
  }

 private:
  int64_t begin_ = 0;
  std::vector<OutputRows> all_;
};

// ---- loops ------------------------------------------------------------------

constexpr int64_t kBlock = 256; // rows, or outputs
constexpr int64_t kElements = 1 << 14; // of a block
constexpr int64_t kGrain = 1 << 15; // elements that are worth a thread

/// A tensor as (outer, extent, inner), and its blocks: some of outer times some
/// of extent.
struct Grid {
  int64_t outer = 1;
  int64_t extent = 0;
  int64_t inner = 1;

  Grid(const Tensor& x, int64_t dim) : extent(x.size(dim)) {
    for (int64_t d = 0; d < x.dim(); ++d) {
      (d < dim ? outer : inner) *= d == dim ? 1 : x.size(d);
    }
  }

  /// Calls visit(outer, along the dim) for all blocks, side by side.
  template <class Visit>
  void visit_blocks(const Visit& visit) const {
    const int64_t step = std::clamp<int64_t>(kElements / inner, 1, kBlock);
    const int64_t rest = std::max<int64_t>(kElements / (step * inner), 1);
    const int64_t blocks = (extent + step - 1) / step;
    const int64_t groups = (outer + rest - 1) / rest;
    const int64_t elements = step * inner * std::min(rest, outer);
    parallel_for(
        inner > 0 ? blocks * groups : 0,
        std::max<int64_t>(kGrain / std::max<int64_t>(elements, 1), 1),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t group = i / blocks * rest;
            const int64_t block = i % blocks * step;
            visit(
                Interval{group, std::min(group + rest, outer)},
                Interval{block, std::min(block + step, extent)});
          }
        });
  }
};

template <class S>
void add_row(
    at::acc_type<S, false>* __restrict to,
    const S* __restrict from,
    at::acc_type<S, false> weight,
    int64_t extent,
    bool first) {
  using T = at::acc_type<S, false>;
  for (int64_t i = 0; i < extent; ++i) { // keeps the sign of a zero
    to[i] = (first ? T(-0.0) : to[i]) + weight * static_cast<T>(from[i]);
  }
}

template <class S>
void store_row(
    S* __restrict to,
    const at::acc_type<S, false>* __restrict from,
    at::acc_type<S, false> scale,
    int64_t extent) {
  for (int64_t i = 0; i < extent; ++i) {
    to[i] = static_cast<S>(from[i] * scale);
  }
}

/// y of x.
template <class S>
void sum_rows(
    S* y,
    const S* x,
    const Grid& outputs,
    int64_t rows,
    const WeightedRows& plan) {
  using T = at::acc_type<S, false>;
  const int64_t inner = outputs.inner;
  outputs.visit_blocks([&](const Interval& outer, const Interval& block) {
    OutputBlock read;
    read.find(plan, block);
    std::vector<T> sums(inner);
    for (int64_t a = outer.begin; a < outer.end; ++a) {
      const S* from = x + a * rows * inner;
      for (int64_t o = block.begin; o < block.end; ++o) {
        const auto& own = read[o];
        std::fill(sums.begin(), sums.end(), 0);
        for (int64_t j = 0; j < own.count; ++j) {
          const auto weight = static_cast<T>(own.weight(j));
          add_row(
              sums.data(), from + own.row(j) * inner, weight, inner, j == 0);
        }
        store_row(
            y + (a * outputs.extent + o) * inner,
            sums.data(),
            static_cast<T>(own.scale),
            inner);
      }
    }
  });
}

/// The gradient of x from that of y: each block of rows looks for the outputs
/// that read it, so that no two threads add to one row.
template <class S>
void spread_outputs(
    S* dx,
    const S* dy,
    const Grid& rows,
    int64_t outputs,
    const WeightedRows& plan) {
  using T = at::acc_type<S, false>;
  const int64_t inner = rows.inner;
  rows.visit_blocks([&](const Interval& outer, const Interval& block) {
    const int64_t extent = block.extent() * inner;
    std::vector<T> sums(outer.extent() * extent);
    const auto readers =
        plan.stencil.readers(block.shifted(plan.rows.begin), plan.outputs)
            .shifted(-plan.outputs.begin);
    OutputBlock read;
    for (int64_t begin = readers.begin; begin < readers.end; begin += kBlock) {
      const Interval some{begin, std::min(begin + kBlock, readers.end)};
      read.find(plan, some);
      for (int64_t a = outer.begin; a < outer.end; ++a) {
        T* const to = sums.data() + (a - outer.begin) * extent;
        for (int64_t o = some.begin; o < some.end; ++o) {
          const auto& own = read[o];
          const S* from = dy + (a * outputs + o) * inner;
          // An average's rows follow each other: only those of the block.
          const bool average = own.taps.rows.empty();
          const int64_t before =
              average ? std::max<int64_t>(block.begin - own.first, 0) : 0;
          const int64_t end =
              average ? std::min(block.end - own.first, own.count) : own.count;
          for (int64_t j = before; j < end; ++j) {
            const int64_t row = own.row(j) - block.begin;
            if (row >= 0 && row < block.extent()) {
              const auto weight = static_cast<T>(own.weight(j) * own.scale);
              add_row(to + row * inner, from, weight, inner, false);
            }
          }
        }
      }
    }
    for (int64_t a = outer.begin; a < outer.end; ++a) {
      store_row(
          dx + (a * rows.extent + block.begin) * inner,
          sums.data() + (a - outer.begin) * extent,
          T(1),
          extent);
    }
  });
}

Tensor resized(const Tensor& x, int64_t dim, int64_t extent) {
  auto sizes = x.sizes().vec();
  sizes[dim] = extent;
  return at::empty(sizes, x.options());
}

Tensor forward(const Tensor& input, const WeightedRows& plan) {
  const auto x = input.contiguous();
  const auto y = resized(x, plan.dim, plan.outputs.extent());
  AT_DISPATCH_FLOATING_TYPES_AND3(
      at::kHalf, at::kBFloat16, at::kByte, x.scalar_type(), "interpolate", [&] {
        sum_rows(
            y.mutable_data_ptr<scalar_t>(),
            x.const_data_ptr<scalar_t>(),
            Grid(y, plan.dim),
            x.size(plan.dim),
            plan);
      });
  return y;
}

Tensor adjoint(const Tensor& grad, const WeightedRows& plan) {
  const auto dy = grad.contiguous();
  const auto dx = resized(dy, plan.dim, plan.rows.extent());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dy.scalar_type(), "interpolate_backward", [&] {
        spread_outputs(
            dx.mutable_data_ptr<scalar_t>(),
            dy.const_data_ptr<scalar_t>(),
            Grid(dx, plan.dim),
            dy.size(plan.dim),
            plan);
      });
  return dx;
}

// ---- operators instead of loops ---------------------------------------------

using Tables = WeightedRows::Tables;

Tables make_tables(const WeightedRows& plan) {
  const int64_t outputs = plan.outputs.extent();
  std::vector<OutputRows> all(outputs);
  int64_t most = 1;
  for (int64_t i = 0; i < outputs; ++i) {
    find_rows(plan, i, all[i]);
    most = std::max(most, all[i].count);
  }
  Tables tables;
  tables.rows.resize(most);
  tables.weights.resize(most);
  for (const auto& own : all) {
    const int64_t last = own.count - 1;
    for (int64_t j = 0; j < most; ++j) {
      const int64_t tap = std::min(j, last);
      const auto times = static_cast<double>(tap == last ? most - last : 1);
      tables.rows[j].push_back(own.row(tap));
      tables.weights[j].push_back(own.weight(tap) / times);
    }
  }
  return tables;
}

/// An average: {rows, the output of each} and {how many each output reads}.
Tables make_average_tables(const WeightedRows& plan) {
  Tables tables;
  tables.rows.resize(2);
  tables.weights.resize(1);
  OutputRows own;
  for (int64_t i = 0; i < plan.outputs.extent(); ++i) {
    find_rows(plan, i, own);
    for (int64_t j = 0; j < own.count; ++j) {
      tables.rows[0].push_back(own.row(j));
      tables.rows[1].push_back(i);
    }
    tables.weights[0].push_back(static_cast<double>(own.count));
  }
  return tables;
}

Tensor by_tables(const Tensor& x, const WeightedRows& plan) {
  const int64_t dim = plan.dim;
  const auto& [rows, weights] = plan.tables();
  const auto chosen = [&](size_t j) {
    return x.index_select(dim, index_tensor(rows[j], x));
  };
  if (plan.kind == Kind::Copies) {
    return chosen(0);
  }
  std::vector<int64_t> shape(x.dim(), 1);
  shape[dim] = plan.outputs.extent();
  const auto spread = [&](size_t j) {
    return weight_tensor(weights[j], x).view(shape);
  };
  if (plan.kind == Kind::Averages) {
    auto sizes = x.sizes().vec();
    sizes[dim] = shape[dim];
    return at::zeros(sizes, x.options())
               .index_add(dim, index_tensor(rows[1], x), chosen(0)) /
        spread(0);
  }
  Tensor sum;
  for (size_t j = 0; j < rows.size(); ++j) {
    const Tensor term = chosen(j) * spread(j);
    sum = sum.defined() ? sum + term : term;
  }
  return sum;
}

} // namespace

const Tables& WeightedRows::tables() const {
  std::call_once(once_, [&] {
    tables_ = kind == Kind::Averages ? make_average_tables(*this)
                                     : make_tables(*this);
  });
  return tables_;
}

Tensor weighted_rows(
    const Tensor& x,
    const std::shared_ptr<const WeightedRows>& plan) {
  return x.is_cpu() && !has_no_values(x)
      ? apply_linear<WeightedRows, forward, adjoint>(x, plan)
      : by_tables(x, *plan);
}

} // namespace shardtensor::detail
