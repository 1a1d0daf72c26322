#include "shardtensor/rules/random/counter_numbers.h"

#include <cmath>
#include <functional>
#include <numeric>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <torch/library.h>

#include "shardtensor/comm/own_operator.h"
#include "shardtensor/dispatch/kernel.h"

namespace shardtensor::detail {
namespace {

using Kind = Distribution::Kind;

/// Of the real and of the imaginary part.
Distribution of_parts(Distribution distribution) {
  if (distribution.kind == Kind::Normal) {
    distribution.b /= std::sqrt(2.0);
  }
  return distribution;
}

at::Tensor numbers_kernel(
    const at::Tensor& key,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    int64_t kind,
    at::ArrayRef<double> parameters,
    at::IntArrayRef integers,
    at::IntArrayRef index_sizes,
    at::IntArrayRef index_strides,
    int64_t index_offset) {
  const Distribution distribution{
      static_cast<Kind>(kind),
      parameters[0],
      parameters[1],
      integers[0],
      static_cast<uint64_t>(integers[1])};
  const GlobalIndex index{index_sizes.vec(), index_strides.vec(), index_offset};
  if (!key.is_cpu()) {
    return numbers_by_tensors(dtype, key, distribution, index).view(sizes);
  }
  const auto result = at::empty(sizes, key.options().dtype(dtype));
  fill_by_loops(
      result,
      static_cast<uint64_t>(*key.const_data_ptr<int64_t>()),
      distribution,
      index);
  return result;
}

at::Tensor numbers_meta(
    const at::Tensor& key,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    int64_t,
    at::ArrayRef<double>,
    at::IntArrayRef,
    at::IntArrayRef,
    at::IntArrayRef,
    int64_t) {
  return at::empty(sizes, key.options().dtype(dtype));
}

at::Tensor samples_kernel(
    int64_t sample,
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& key,
    at::IntArrayRef index_sizes,
    at::IntArrayRef index_strides,
    int64_t index_offset) {
  const auto on_host = samples_by_loops(
      static_cast<Sample>(sample),
      a.cpu(),
      b.cpu(),
      static_cast<uint64_t>(key.item<int64_t>()),
      {index_sizes.vec(), index_strides.vec(), index_offset});
  return on_host.to(a.device());
}

at::Tensor samples_meta(
    int64_t,
    const at::Tensor& a,
    const at::Tensor&,
    const at::Tensor&,
    at::IntArrayRef,
    at::IntArrayRef,
    int64_t) {
  return at::empty(a.sizes(), a.options());
}

} // namespace

int64_t GlobalIndex::numel() const {
  return std::accumulate(
      sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

GlobalIndex global_index(const ShardSpec& spec) {
  return global_index(spec, spec.dim());
}

GlobalIndex global_index(const ShardSpec& spec, int64_t dims) {
  GlobalIndex index;
  int64_t stride = 1;
  for (auto dim = dims; dim-- > 0;) {
    const auto add = [&](int64_t size, int64_t step) {
      index.sizes.insert(index.sizes.begin(), size);
      index.strides.insert(index.strides.begin(), step);
    };
    if (spec.is_sharded(dim)) {
      const auto& partition = spec.partition(dim);
      const auto rows = spec.interval(dim);
      add(rows.extent(), stride);
      add(partition.repeat(), partition.period() * stride);
      index.offset += rows.begin * stride;
    } else {
      add(spec.size(dim), stride);
    }
    stride *= spec.size(dim);
  }
  return index;
}

GlobalIndex with_inner(GlobalIndex index, int64_t count) {
  for (auto& stride : index.strides) {
    stride *= count;
  }
  index.sizes.push_back(count);
  index.strides.push_back(1);
  index.offset *= count;
  return index;
}

at::Tensor draw_key(
    const at::Tensor& like,
    const std::optional<at::Generator>& generator) {
  return at::empty({1}, like.options().dtype(at::kLong)).random_(generator);
}

at::Tensor counter_numbers(
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    const at::Tensor& key,
    const Distribution& distribution,
    const GlobalIndex& index) {
  if (at::isComplexType(dtype)) {
    auto inner_sizes = sizes.vec();
    inner_sizes.push_back(2);
    return at::view_as_complex(counter_numbers(
        inner_sizes,
        at::toRealValueType(dtype),
        key,
        of_parts(distribution),
        with_inner(index, 2)));
  }
  static const auto op = find_own_operator<decltype(numbers_kernel)>(
      "shardtensor::counter_numbers");
  return op.call(
      key,
      sizes,
      dtype,
      static_cast<int64_t>(distribution.kind),
      {distribution.a, distribution.b},
      {distribution.from, static_cast<int64_t>(distribution.range)},
      index.sizes,
      index.strides,
      index.offset);
}

void fill_counter_numbers(
    at::Tensor local,
    const at::Tensor& key,
    const Distribution& distribution,
    const GlobalIndex& index) {
  const bool is_direct = local.is_cpu() && !is_traced(local) &&
      local.is_contiguous() && !local.is_complex() && !local.is_neg();
  if (!is_direct) {
    local.copy_(counter_numbers(
        local.sizes(), local.scalar_type(), key, distribution, index));
    return;
  }
  fill_by_loops(
      local,
      static_cast<uint64_t>(*key.const_data_ptr<int64_t>()),
      distribution,
      index);
}

void fill_own_part(
    const at::Tensor& self,
    const at::Tensor& key,
    const Distribution& distribution) {
  const auto target = without_partial(spec(self));
  const auto index = global_index(*target);
  if (spec(self) != target) {
    const auto& sizes = target->local_sizes();
    write_local(
        self,
        counter_numbers(sizes, self.scalar_type(), key, distribution, index),
        target);
    return;
  }
  const LocalToWrite part(self, target);
  fill_counter_numbers(part.local(), key, distribution, index);
  part.finish();
}

at::Tensor counter_samples(
    Sample sample,
    const at::Tensor& a,
    const at::Tensor& b,
    const at::Tensor& key,
    const GlobalIndex& index) {
  static const auto op = find_own_operator<decltype(samples_kernel)>(
      "shardtensor::counter_samples");
  return op.call(
      static_cast<int64_t>(sample),
      a,
      b,
      key,
      index.sizes,
      index.strides,
      index.offset);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("counter_numbers", numbers_kernel);
  m.impl("counter_samples", samples_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("counter_numbers", numbers_meta);
  m.impl("counter_samples", samples_meta);
}

} // namespace shardtensor::detail
