#include "shardtensor/rules/spectra/memory_order.h"

#include <algorithm>
#include <numeric>

#include <ATen/Context.h>

#include "shardtensor/dispatch/nominal_strides.h"

namespace shardtensor::detail {
namespace {

using Dims = std::vector<int64_t>;

/// A tensor that one kernel after the other transforms.
struct InMemory {
  Dims sizes;
  Dims strides;

  void sort_outermost_first(Dims& dims) const {
    std::stable_sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) {
      return strides[a] > strides[b];
    });
  }

  /// Transforms lines along `dims`, the last of which lies innermost.
  void transform(const Dims& dims) {
    Dims order;
    for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
      if (std::find(dims.begin(), dims.end(), dim) == dims.end()) {
        order.push_back(dim);
      }
    }
    sort_outermost_first(order);
    order.insert(order.end(), dims.begin(), dims.end());
    std::reverse(order.begin(), order.end());
    strides = dense_strides(order, sizes);
  }

  /// Complex lines, those of at most `most` dims at a time.
  void transform_complex(Dims dims, size_t most) {
    while (!dims.empty()) {
      sort_outermost_first(dims);
      const auto first = dims.end() - std::min(most, dims.size());
      transform({first, dims.end()});
      dims.erase(first, dims.end());
    }
  }

  void make_row_major() {
    Dims order(sizes.size());
    std::iota(order.rbegin(), order.rend(), 0);
    strides = dense_strides(order, sizes);
  }
};

constexpr size_t kMostDimsOfCufft = 3;

/// Whether cuFFT takes the real lines together with those of the other dims.
bool is_one_call_of_cufft(const Dims& dims) {
  return dims.size() <= kMostDimsOfCufft &&
      !(dims.size() >= 2 && dims[0] == 0 && dims[1] == 1);
}

void transform_on_cuda(InMemory& x, Dims dims, Lines lines) {
  if (lines == Lines::Complex) {
    return x.transform_complex(dims, kMostDimsOfCufft);
  }
  if (lines == Lines::ToReal &&
      (dims.size() == 1 || is_one_call_of_cufft(dims))) {
    x.make_row_major(); // it writes into its input, so it takes a copy
  }
  if (is_one_call_of_cufft(dims)) {
    return x.transform(dims);
  }
  const auto last = dims.back();
  dims.pop_back();
  if (lines == Lines::FromReal) {
    x.transform({last});
    x.transform_complex(dims, kMostDimsOfCufft);
  } else {
    x.transform_complex(dims, kMostDimsOfCufft);
    x.transform({last});
  }
}

void transform_by_mkl(InMemory& x, Dims dims, Lines lines) {
  const auto all = dims.size();
  if (lines == Lines::Complex) {
    return x.transform_complex(dims, all);
  }
  const auto last = dims.back();
  dims.pop_back();
  if (lines == Lines::FromReal) {
    x.sort_outermost_first(dims);
    dims.push_back(last);
    x.transform(dims);
  } else {
    x.transform_complex(dims, all);
    x.transform({last});
  }
}

} // namespace

Dims transformed_strides(const at::Tensor& x, const Transform& transform) {
  if (x.numel() == 0 || (x.is_cpu() && !at::hasMKL())) {
    return {};
  }
  InMemory result{x.sizes().vec(), x.strides().vec()};
  if (transform.lines != Lines::Complex) {
    result.sizes[transform.dims.back()] = transform.extent;
  }
  if (x.is_cpu()) {
    transform_by_mkl(result, transform.dims, transform.lines);
  } else {
    transform_on_cuda(result, transform.dims, transform.lines);
  }
  return result.strides;
}

} // namespace shardtensor::detail
