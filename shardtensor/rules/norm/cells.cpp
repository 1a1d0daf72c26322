#include "shardtensor/rules/norm/cells.h"

#include <algorithm>
#include <array>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/rules/norm/cell_kernels.h"
#include "shardtensor/rules/norm/loops.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {

using at::Tensor;

namespace {

constexpr int64_t kShortest = 64; // elements of a cell worth a call
constexpr int64_t kLargest = 65536; // elements of interleaved cells in one call
constexpr int64_t kGrain = 32768; // elements worth a thread

using Dims = std::vector<int64_t>;

bool contains(const Dims& sorted, int64_t dim) {
  return std::binary_search(sorted.begin(), sorted.end(), dim);
}

// ---- cells ------------------------------------------------------------------

/// Tensors of one kind whose memory may be looked at.
bool are_alike(const std::vector<Tensor>& tensors) {
  const auto& x = tensors[0];
  return x.numel() > 0 &&
      std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& tensor) {
           return !is_traced(tensor) && tensor.device() == x.device() &&
               tensor.scalar_type() == x.scalar_type() &&
               tensor.sizes() == x.sizes();
         });
}

bool have_loops(const Tensor& x) {
  return x.is_cpu() &&
      (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble ||
       x.scalar_type() == at::kBFloat16);
}

/// The dims of x with more than one element, from the innermost in memory, as
/// far as all tensors hold them alike and without gaps.
Dims memory_order(const std::vector<Tensor>& tensors) {
  const auto& x = tensors[0];
  Dims order;
  for (int64_t dim = x.dim() - 1; dim >= 0; --dim) {
    if (x.size(dim) > 1) {
      order.push_back(dim);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return x.stride(a) < x.stride(b);
  });
  int64_t inner = 1;
  const auto end = std::find_if(order.begin(), order.end(), [&](int64_t dim) {
    const bool dense =
        std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& tensor) {
          return tensor.stride(dim) == inner;
        });
    inner *= x.size(dim);
    return !dense;
  });
  order.erase(end, order.end());
  return order;
}

/// Cells that begin after the innermost `inner` dims; interleaved ones together
/// have at most `largest` elements.
Cells cells_beyond(
    size_t inner,
    const Tensor& x,
    const Dims& order,
    const Dims& constant,
    int64_t largest) {
  Cells cells;
  for (size_t i = 0; i < inner; ++i) {
    cells.interleaved.push_back(order[i]);
    cells.width *= x.size(order[i]);
  }
  for (size_t i = inner; i < order.size(); ++i) {
    const bool fits = cells.width == 1 || cells.length == 1 ||
        cells.length * cells.width * x.size(order[i]) <= largest;
    if (!contains(constant, order[i]) || !fits) {
      break;
    }
    cells.dims.push_back(order[i]);
    cells.length *= x.size(order[i]);
  }
  return cells;
}

/// Sizes and dense strides of what is known of the cells: interleaved ones side
/// by side. Other dims have the sizes given.
Tensor empty_by_cell(const Dims& sizes, const Tensor& x, const Cells& cells) {
  Dims strides(sizes.size());
  int64_t stride = 1;
  const auto place = [&](bool interleaved) {
    for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
      if (contains(cells.interleaved, dim) == interleaved) {
        strides[dim] = stride;
        stride *= sizes[dim];
      }
    }
  };
  place(true);
  place(false);
  return at::empty_strided(
      sizes, strides, x.options().dtype(at::toOpMathType(x.scalar_type())));
}

Tensor per_cell(const Tensor& x, const Cells& cells) {
  auto sizes = x.sizes().vec();
  for (const int64_t dim : cells.dims) {
    sizes[dim] = 1;
  }
  return empty_by_cell(sizes, x, cells);
}

/// What is known of each cell, in the type of the arithmetic; zero if
/// undefined.
Tensor known(const Tensor& tensor, const Tensor& x, const Cells& cells) {
  if (cells.width == 1) {
    const auto dtype = at::toOpMathType(x.scalar_type());
    return tensor.defined() ? tensor.to(dtype)
                            : at::zeros({1}, x.options().dtype(dtype));
  }
  Dims sizes(x.dim(), 1);
  if (tensor.defined()) {
    sizes = tensor.sizes().vec();
  }
  for (const int64_t dim : cells.interleaved) {
    sizes[dim] = x.size(dim);
  }
  auto result = empty_by_cell(sizes, x, cells);
  return tensor.defined() ? result.copy_(tensor) : result.zero_();
}

/// The first element of each cell, of interleaved ones that of the first.
Tensor first_elements(const Tensor& x, const Cells& cells) {
  auto sizes = x.sizes().vec();
  for (const auto* dims : {&cells.dims, &cells.interleaved}) {
    for (const int64_t dim : *dims) {
      if (dim < x.dim()) {
        sizes[dim] = 1;
      }
    }
  }
  return x.as_strided(sizes, x.strides(), x.storage_offset());
}

/// To elements of the type that is asked for.
struct Pointer {
  template <class T>
  operator T*() const {
    return reinterpret_cast<T*>(to);
  }
  char* to;
};

/// Calls visit(pointers) for each cell, or each set of interleaved ones, with a
/// pointer into each tensor: to what it says of the first cell, or to that
/// cell's first element. PyTorch's threads share the cells.
template <size_t kTensors, class Visit>
void visit_cells(
    const Cells& cells,
    const std::array<Tensor, kTensors>& tensors,
    int64_t outputs,
    const Visit& visit) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).resize_outputs(false);
  config.check_all_same_dtype(false);
  for (size_t i = 0; i < kTensors; ++i) {
    if (static_cast<int64_t>(i) < outputs) {
      config.add_owned_output(first_elements(tensors[i], cells));
    } else {
      config.add_owned_const_input(first_elements(tensors[i], cells));
    }
  }
  const auto visit_grid =
      [&](char** data, const int64_t* strides, int64_t columns, int64_t rows) {
        std::array<Pointer, kTensors> at;
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t column = 0; column < columns; ++column) {
            for (size_t i = 0; i < kTensors; ++i) {
              at[i].to =
                  data[i] + column * strides[i] + row * strides[kTensors + i];
            }
            visit(at);
          }
        }
      };
  const int64_t elements = cells.length * cells.width;
  config.build().for_each(visit_grid, std::max<int64_t>(kGrain / elements, 1));
}

} // namespace

namespace {

Cells longest_cells(
    const Tensor& x,
    const Dims& order,
    const Dims& constant,
    int64_t largest) {
  Cells best;
  for (size_t inner = 0; inner < order.size(); ++inner) {
    // What is known of interleaved cells lies in the order of their dims.
    if (inner > 1 && order[inner - 1] > order[inner - 2]) {
      break;
    }
    auto cells = cells_beyond(inner, x, order, constant, largest);
    if (cells.length > best.length) {
      best = std::move(cells);
    }
  }
  for (const int64_t dim : constant) {
    if (x.size(dim) == 1) {
      best.dims.push_back(dim);
    }
  }
  std::sort(best.dims.begin(), best.dims.end());
  std::sort(best.interleaved.begin(), best.interleaved.end());
  return best;
}

std::optional<Cells> find_loop_cells(
    const std::vector<Tensor>& tensors,
    const Dims& constant) {
  auto cells =
      longest_cells(tensors[0], memory_order(tensors), constant, kLargest);
  return cells.length < kShortest ? std::nullopt : std::optional(cells);
}

} // namespace

std::optional<Cells> find_kernel_cells(
    const std::vector<Tensor>& tensors,
    const Dims& constant) {
  const auto& x = tensors[0];
  auto order = memory_order(tensors); // without dims of one element, or gaps
  if (count_over(x.sizes(), order) < x.numel()) {
    return std::nullopt;
  }
  auto cells = longest_cells(x, order, constant, x.numel());
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (x.size(dim) == 1) {
      order.push_back(dim);
    }
  }
  cells.order.assign(order.rbegin(), order.rend());
  return suit_kernels(x, cells) ? std::optional(cells) : std::nullopt;
}

std::optional<Cells> find_cells(
    const std::vector<Tensor>& tensors,
    const Dims& constant) {
  if (!are_alike(tensors)) {
    return std::nullopt;
  }
  if (have_kernels(tensors[0])) {
    return find_kernel_cells(tensors, constant);
  }
  return have_loops(tensors[0]) ? find_loop_cells(tensors, constant)
                                : std::nullopt;
}

// ---- passes -----------------------------------------------------------------

Moments cell_moments(const Tensor& x, const Cells& cells) {
  if (!cells.order.empty()) {
    return moments_by_kernels(x, cells);
  }
  const Moments result{per_cell(x, cells), per_cell(x, cells)};
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "cell_moments", [&] {
        visit_cells(
            cells,
            std::array{result.mean, result.squares, x},
            2,
            [&](const auto& at) {
              moments_of<at::opmath_type<scalar_t>, scalar_t>(
                  at[2], cells.length, cells.width, at[0], at[1]);
            });
      });
  return result;
}

CellSums cell_sums(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& y,
    const Cells& cells) {
  if (!cells.order.empty()) {
    return sums_by_kernels(x, mean, y, cells);
  }
  const CellSums result{per_cell(x, cells), per_cell(x, cells)};
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "cell_sums", [&] {
        visit_cells(
            cells,
            std::array{
                result.values, result.products, x, y, known(mean, x, cells)},
            2,
            [&](const auto& at) {
              sums_of<at::opmath_type<scalar_t>, scalar_t>(
                  at[2], at[4], at[3], cells.length, cells.width, at[0], at[1]);
            });
      });
  return result;
}

Tensor scale_cells(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& scale,
    const Tensor& bias,
    const Cells& cells) {
  if (!cells.order.empty()) {
    return scale_by_kernels(x, mean, scale, bias, cells);
  }
  auto result = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "scale_cells", [&] {
        visit_cells(
            cells,
            std::array{
                result,
                x,
                known(mean, x, cells),
                known(scale, x, cells),
                known(bias, x, cells)},
            1,
            [&](const auto& at) {
              scale_of<at::opmath_type<scalar_t>, scalar_t>(
                  at[0], at[1], at[2], at[3], at[4], cells.length, cells.width);
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
    const Cells& cells) {
  if (!cells.order.empty()) {
    return combine_by_kernels(x, mean, scale, y, scale_y, bias, cells);
  }
  auto result = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "combine_cells", [&] {
        visit_cells(
            cells,
            std::array{
                result,
                x,
                y,
                known(mean, x, cells),
                known(scale, x, cells),
                known(scale_y, x, cells),
                known(bias, x, cells)},
            1,
            [&](const auto& at) {
              combine_of<at::opmath_type<scalar_t>, scalar_t>(
                  at[0],
                  at[1],
                  at[2],
                  at[3],
                  at[4],
                  at[5],
                  at[6],
                  cells.length,
                  cells.width);
            });
      });
  return result;
}

} // namespace shardtensor::detail
