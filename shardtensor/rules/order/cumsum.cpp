#include <memory>
#include <vector>

#include <ATen/OpMathType.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/cumsum_ops.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/autocast.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/plans/merge_plan.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/tensor/gradients/linear_map.h"
#include "shardtensor/tensor/redistribute.h"

// cumsum along a cut dim. Every piece is summed up by itself; the pieces'
// totals are a tensor of one row for each piece, of which every rank gets the
// sum of the rows before its own. The adjoint sums up from the other end: at
// the function level the gradient needs no flip of the whole tensor, as ATen's
// formula does.

namespace shardtensor::detail {
namespace {

using at::Tensor;

struct SumPlan {
  static constexpr auto kNodeName = "CumsumOfPieces";
  int64_t dim;
  SpecPtr layout; // of what is summed up: the dim is cut once
  SpecPtr totals; // a row of the dim for each piece
  SpecPtr whole; // the same where sums over pieces are made
};

std::shared_ptr<const SumPlan> find_plan(const SpecPtr& given, int64_t dim) {
  static PlanCache<SumPlan> plans;
  PlanKey key;
  key.add(given).add(dim);
  return plans.find(key, [&] {
    const auto layout = contiguous_dim(without_partial(given), dim);
    const auto pieces = layout->partition(dim).pieces();
    const auto totals =
        with_partition(layout, dim, Partition(std::vector<int64_t>(pieces, 1)));
    const auto whole = pieces <= kMostTerms ? without_shard(totals, dim)
                                            : whole_dims(totals, {dim});
    return SumPlan{dim, layout, totals, whole};
  });
}

enum class From { First, Last };

template <From end>
Tensor summed_up(const Tensor& x, int64_t dim) {
  return end == From::First
      ? at::cumsum(x, dim)
      : at::flip(at::cumsum(at::flip(x, {dim}), dim), {dim});
}

/// The last row that is summed up; zeros of an empty piece.
template <From end>
Tensor total_of(const Tensor& sums, int64_t dim) {
  const auto rows = sums.size(dim);
  if (rows == 0) {
    auto sizes = sums.sizes().vec();
    sizes[dim] = 1;
    return sums.new_zeros(sizes);
  }
  return sums.narrow(dim, end == From::First ? rows - 1 : 0, 1);
}

/// In each row the sum of those before it: of these alone, they may be
/// infinite.
template <From end>
Tensor sums_before(const Tensor& totals, int64_t dim) {
  const bool first = end == From::First;
  const auto none = at::zeros_like(totals.narrow(dim, 0, 1));
  const auto sums = summed_up<end>(
      totals.narrow(dim, first ? 0 : 1, totals.size(dim) - 1), dim);
  return first ? at::cat({none, sums}, dim) : at::cat({sums, none}, dim);
}

/// Narrow types are added in fp32, as PyTorch's kernels do.
template <From end>
Tensor sums_across_pieces(const Tensor& x, const SumPlan& plan) {
  const auto dim = plan.dim;
  auto sums = summed_up<end>(x.to(at::toOpMathType(x.scalar_type())), dim);
  const auto totals =
      redistribute_local(total_of<end>(sums, dim), plan.totals, plan.whole);
  const auto before = redistribute_local(
      sums_before<end>(totals, dim), plan.whole, plan.totals);
  return sums.add_(before).to(x.scalar_type());
}

at::ScalarType dtype_of_sums(
    const Tensor& x,
    std::optional<at::ScalarType> dtype) {
  return dtype.value_or(
      at::isIntegralType(x.scalar_type(), /*includeBool=*/true)
          ? at::kLong
          : x.scalar_type());
}

/// Below autograd: what belongs to torch.func's transforms, and what is written
/// into a tensor.
Tensor cumsum_kernel(
    const Tensor& self,
    int64_t dim,
    std::optional<at::ScalarType> dtype) {
  const auto& given = spec(self);
  dim = at::maybe_wrap_dim(dim, given->dim());
  if (given->is_whole(dim)) {
    const auto x = local_of(self);
    return wrap(at::cumsum(x.tensor, dim, dtype), x.spec);
  }
  const CommScope scope(at::_ops::cumsum::name);
  const auto plan = find_plan(given, dim);
  const auto x =
      local_of(self, plan->layout).tensor.to(dtype_of_sums(self, dtype));
  return wrap(sums_across_pieces<From::First>(x, *plan), plan->layout);
}

Tensor cumsum_function(
    c10::DispatchKeySet keys,
    const Tensor& self,
    int64_t dim,
    std::optional<at::ScalarType> dtype) {
  const auto& given = spec(self);
  dim = at::maybe_wrap_dim(dim, given->dim());
  if (given->is_whole(dim)) {
    return at::_ops::cumsum::redispatch(
        below_function_level(keys), self, dim, dtype);
  }
  const auto plan = find_plan(given, dim);
  const auto x = dtype ? self : autocast_to_float(at::_ops::cumsum::name, self);
  const auto local = to_local(redistribute(x, plan->layout));
  return from_local(
      apply_linear<
          SumPlan,
          sums_across_pieces<From::First>,
          sums_across_pieces<From::Last>>(
          local.to(dtype_of_sums(x, dtype)), plan),
      plan->layout);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("cumsum", cumsum_kernel);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl("cumsum", function_rule<at::_ops::cumsum, cumsum_function>);
}

} // namespace shardtensor::detail
