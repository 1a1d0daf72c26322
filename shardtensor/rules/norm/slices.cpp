#include "shardtensor/rules/norm/slices.h"

#include <algorithm>
#include <array>

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include "shardtensor/rules/norm/loops.h"
#include "shardtensor/rules/norm/slice_kernels.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {

using at::Tensor;

namespace {

constexpr int64_t kShortest = 64; // elements of a slice worth a call
constexpr int64_t kLargest =
    65536; // elements of interleaved slices in one call
constexpr int64_t kGrain = 32768; // elements worth a thread

using Dims = std::vector<int64_t>;

bool contains(const Dims& sorted, int64_t dim) {
  return std::binary_search(sorted.begin(), sorted.end(), dim);
}

// ---- slices
// ------------------------------------------------------------------

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

/// Slices that begin after the innermost `inner` dims; interleaved ones
/// together have at most `largest` elements.
Slices slices_beyond(
    size_t inner,
    const Tensor& x,
    const Dims& order,
    const Dims& constant,
    int64_t largest) {
  Slices slices;
  for (size_t i = 0; i < inner; ++i) {
    slices.interleaved.push_back(order[i]);
    slices.width *= x.size(order[i]);
  }
  for (size_t i = inner; i < order.size(); ++i) {
    const bool fits = slices.width == 1 || slices.length == 1 ||
        slices.length * slices.width * x.size(order[i]) <= largest;
    if (!contains(constant, order[i]) || !fits) {
      break;
    }
    slices.dims.push_back(order[i]);
    slices.length *= x.size(order[i]);
  }
  return slices;
}

/// Sizes and dense strides of what is known of the slices: interleaved ones
/// side by side. Other dims have the sizes given.
Tensor empty_by_slice(
    const Dims& sizes,
    const Tensor& x,
    const Slices& slices) {
  Dims strides(sizes.size());
  int64_t stride = 1;
  const auto place = [&](bool interleaved) {
    for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
      if (contains(slices.interleaved, dim) == interleaved) {
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

Tensor per_slice(const Tensor& x, const Slices& slices) {
  auto sizes = x.sizes().vec();
  for (const int64_t dim : slices.dims) {
    sizes[dim] = 1;
  }
  return empty_by_slice(sizes, x, slices);
}

/// What is known of each slice, in the type of the arithmetic; zero if
/// undefined.
Tensor known(const Tensor& tensor, const Tensor& x, const Slices& slices) {
  if (slices.width == 1) {
    const auto dtype = at::toOpMathType(x.scalar_type());
    return tensor.defined() ? tensor.to(dtype)
                            : at::zeros({1}, x.options().dtype(dtype));
  }
  Dims sizes(x.dim(), 1);
  if (tensor.defined()) {
    sizes = tensor.sizes().vec();
  }
  for (const int64_t dim : slices.interleaved) {
    sizes[dim] = x.size(dim);
  }
  auto result = empty_by_slice(sizes, x, slices);
  return tensor.defined() ? result.copy_(tensor) : result.zero_();
}

/// The first element of each slice, of interleaved ones that of the first.
Tensor first_elements(const Tensor& x, const Slices& slices) {
  auto sizes = x.sizes().vec();
  for (const auto* dims : {&slices.dims, &slices.interleaved}) {
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

/// Calls visit(pointers) for each slice, or each set of interleaved ones, with
/// a pointer into each tensor: to what it says of the first slice, or to that
/// slice's first element. PyTorch's threads share the slices.
template <size_t kTensors, class Visit>
void visit_slices(
    const Slices& slices,
    const std::array<Tensor, kTensors>& tensors,
    int64_t outputs,
    const Visit& visit) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false).resize_outputs(false);
  config.check_all_same_dtype(false);
  for (size_t i = 0; i < kTensors; ++i) {
    if (static_cast<int64_t>(i) < outputs) {
      config.add_owned_output(first_elements(tensors[i], slices));
    } else {
      config.add_owned_const_input(first_elements(tensors[i], slices));
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
  const int64_t elements = slices.length * slices.width;
  config.build().for_each(visit_grid, std::max<int64_t>(kGrain / elements, 1));
}

} // namespace

namespace {

Slices longest_slices(
    const Tensor& x,
    const Dims& order,
    const Dims& constant,
    int64_t largest) {
  Slices best;
  for (size_t inner = 0; inner < order.size(); ++inner) {
    // What is known of interleaved slices lies in the order of their dims.
    if (inner > 1 && order[inner - 1] > order[inner - 2]) {
      break;
    }
    auto slices = slices_beyond(inner, x, order, constant, largest);
    if (slices.length > best.length) {
      best = std::move(slices);
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

std::optional<Slices> find_loop_slices(
    const std::vector<Tensor>& tensors,
    const Dims& constant) {
  auto slices =
      longest_slices(tensors[0], memory_order(tensors), constant, kLargest);
  return slices.length < kShortest ? std::nullopt : std::optional(slices);
}

} // namespace

std::optional<Slices> find_kernel_slices(
    const std::vector<Tensor>& tensors,
    const Dims& constant) {
  const auto& x = tensors[0];
  auto order = memory_order(tensors); // without dims of one element, or gaps
  if (count_over(x.sizes(), order) < x.numel()) {
    return std::nullopt;
  }
  auto slices = longest_slices(x, order, constant, x.numel());
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (x.size(dim) == 1) {
      order.push_back(dim);
    }
  }
  slices.order.assign(order.rbegin(), order.rend());
  return suit_kernels(x, slices) ? std::optional(slices) : std::nullopt;
}

std::optional<Slices> find_slices(
    const std::vector<Tensor>& tensors,
    const Dims& constant) {
  if (!are_alike(tensors)) {
    return std::nullopt;
  }
  if (have_kernels(tensors[0])) {
    return find_kernel_slices(tensors, constant);
  }
  return have_loops(tensors[0]) ? find_loop_slices(tensors, constant)
                                : std::nullopt;
}

// ---- passes -----------------------------------------------------------------

Moments slice_moments(const Tensor& x, const Slices& slices) {
  if (!slices.order.empty()) {
    return moments_by_kernels(x, slices);
  }
  const Moments result{per_slice(x, slices), per_slice(x, slices)};
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "slice_moments", [&] {
        visit_slices(
            slices,
            std::array{result.mean, result.squares, x},
            2,
            [&](const auto& at) {
              moments_of<at::opmath_type<scalar_t>, scalar_t>(
                  at[2], slices.length, slices.width, at[0], at[1]);
            });
      });
  return result;
}

SliceSums slice_sums(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& y,
    const Slices& slices) {
  if (!slices.order.empty()) {
    return sums_by_kernels(x, mean, y, slices);
  }
  const SliceSums result{per_slice(x, slices), per_slice(x, slices)};
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "slice_sums", [&] {
        visit_slices(
            slices,
            std::array{
                result.values, result.products, x, y, known(mean, x, slices)},
            2,
            [&](const auto& at) {
              sums_of<at::opmath_type<scalar_t>, scalar_t>(
                  at[2],
                  at[4],
                  at[3],
                  slices.length,
                  slices.width,
                  at[0],
                  at[1]);
            });
      });
  return result;
}

Tensor scale_slices(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& scale,
    const Tensor& bias,
    const Slices& slices) {
  if (!slices.order.empty()) {
    return scale_by_kernels(x, mean, scale, bias, slices);
  }
  auto result = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "scale_slices", [&] {
        visit_slices(
            slices,
            std::array{
                result,
                x,
                known(mean, x, slices),
                known(scale, x, slices),
                known(bias, x, slices)},
            1,
            [&](const auto& at) {
              scale_of<at::opmath_type<scalar_t>, scalar_t>(
                  at[0],
                  at[1],
                  at[2],
                  at[3],
                  at[4],
                  slices.length,
                  slices.width);
            });
      });
  return result;
}

Tensor combine_slices(
    const Tensor& x,
    const Tensor& mean,
    const Tensor& scale,
    const Tensor& y,
    const Tensor& scale_y,
    const Tensor& bias,
    const Slices& slices) {
  if (!slices.order.empty()) {
    return combine_by_kernels(x, mean, scale, y, scale_y, bias, slices);
  }
  auto result = at::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES_AND(
      at::kBFloat16, x.scalar_type(), "combine_slices", [&] {
        visit_slices(
            slices,
            std::array{
                result,
                x,
                y,
                known(mean, x, slices),
                known(scale, x, slices),
                known(scale_y, x, slices),
                known(bias, x, slices)},
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
                  slices.length,
                  slices.width);
            });
      });
  return result;
}

} // namespace shardtensor::detail
