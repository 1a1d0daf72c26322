#pragma once

#include <functional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/halo/stencil_call.h"
#include "shardtensor/layout/plans/plan_cache.h"

namespace shardtensor::detail {

/// The global sizes of an operator's result, from a call of `plain` on an input
/// without samples: no work and no memory, and PyTorch raises its own errors.
/// The input has `dims` trailing dims after channels, and perhaps a batch
/// first.
std::vector<int64_t> infer_sizes(
    const char* op,
    const at::Tensor& x,
    int64_t dims,
    const std::function<at::Tensor(const at::Tensor&)>& plain);

/// Of what the CPU's kernels lay as their input and devices' row-major.
inline at::MemoryFormat format_on(const at::Tensor& x) {
  return x.is_cpu() ? x.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

inline at::Tensor as_it_is(const at::Tensor& local) {
  return local;
}

/// The local call of a stencil between gathering and keeping: `local` gets
/// this rank's rows. `prepare` is applied before they travel. The result shows
/// the strides of `format`.
template <typename Local>
at::Tensor run_stencil(
    const at::Tensor& x,
    const StencilCall& call,
    at::MemoryFormat format,
    const Local& local,
    at::Tensor (*prepare)(const at::Tensor&) = as_it_is) {
  const at::Tensor input = to_local(redistribute(x, call.input));
  if (!call.input->mesh()->contains_this_rank()) {
    return from_local(
        prepare(input).new_zeros(call.output->local_sizes()),
        call.output,
        format);
  }
  return from_local(
      keep_owned(
          local(gather_rows(prepare(input), call, x.suggest_memory_format())),
          call),
      call.output,
      format);
}

/// With the input's format.
template <typename Local>
at::Tensor run_stencil(
    const at::Tensor& x,
    const StencilCall& call,
    const Local& local) {
  return run_stencil(x, call, x.suggest_memory_format(), local);
}

/// As run_stencil where `local` returns values and global flat indices.
template <typename Local>
std::tuple<at::Tensor, at::Tensor> run_stencil_with_indices(
    const at::Tensor& x,
    const StencilCall& call,
    const Local& local) {
  at::Tensor indices;
  const at::Tensor values = run_stencil(x, call, [&](const at::Tensor& rows) {
    auto [values, of_values] = local(rows);
    indices = keep_owned(of_values, call);
    return values;
  });
  if (!indices.defined()) { // this rank is not in the mesh
    indices = to_local(values).to(at::kLong);
  }
  return {values, from_local(indices, call.output, x.suggest_memory_format())};
}

} // namespace shardtensor::detail
