#include "shardtensor/collectives/parallel_regions.h"

#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "shardtensor/collectives/check_rows.h"
#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/comm/scope.h"

namespace shardtensor {

using namespace detail;

namespace {

using torch::autograd::variable_list;

// ---- autograd ---------------------------------------------------------------

using Map = std::function<at::Tensor(const at::Tensor&)>;

class RegionBackward : public torch::autograd::Node {
 public:
  RegionBackward(const char* op, Map backward)
      : op_(op), backward_(std::move(backward)), scope_(current_comm_scope()) {}

  std::string name() const override {
    return std::string(op_) + "Backward";
  }

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) {
      return {at::Tensor()};
    }
    const CommScope scope(backward_of(scope_));
    return {backward_(gradients[0])};
  }

 private:
  const char* op_;
  Map backward_;
  std::string scope_;
};

/// forward(x), another tensor than x, whose gradient is backward(gradient).
at::Tensor region(
    const char* op,
    const at::Tensor& x,
    const Map& forward,
    Map backward) {
  at::Tensor result;
  {
    const at::NoGradGuard no_grad;
    result = forward(x);
  }
  if (needs_node(x)) {
    // What is written into a view is refused, with the reason.
    if (auto* view = torch::autograd::impl::get_view_autograd_meta(result)) {
      view->set_creation_meta(
          torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
    }
    connect<RegionBackward>(result, x, op, std::move(backward));
  }
  return result;
}

constexpr auto kCopy = "copy_to_parallel_region";
constexpr auto kReduce = "reduce_from_parallel_region";
constexpr auto kScatter = "scatter_to_parallel_region";
constexpr auto kGather = "gather_from_parallel_region";

// ---- the regions, of arguments that fit -------------------------------------

/// Where a rank's rows are, the same on all ranks but for which are its own.
struct Rows {
  int64_t dim;
  std::vector<int64_t> sizes;
  std::string group;
};

at::Tensor total(const at::Tensor& x, const std::string& group) {
  const auto sum = adds_in_fp32(x)
      ? all_reduce(x.to(at::kFloat), Reduce::Sum, group).to(x.scalar_type())
      : all_reduce(x, Reduce::Sum, group);
  return sum.is_same(x) ? x.clone() : sum;
}

at::Tensor own_rows(const at::Tensor& x, const Rows& rows) {
  const int64_t rank = Group(rows.group).rank();
  const auto before = c10::IntArrayRef(rows.sizes).slice(0, rank);
  return x.narrow(rows.dim, sum(before), rows.sizes[rank])
      .clone(at::MemoryFormat::Contiguous);
}

at::Tensor reduce_from(const at::Tensor& x, const std::string& group);

at::Tensor copy_to(const at::Tensor& x, const std::string& group) {
  return region(
      kCopy,
      x,
      [](const auto& value) { return value.view_as(value); },
      [=](const auto& grad) { return reduce_from(grad, group); });
}

at::Tensor reduce_from(const at::Tensor& x, const std::string& group) {
  return region(
      kReduce,
      x,
      [&](const auto& value) { return total(value, group); },
      [=](const auto& grad) { return copy_to(grad, group); });
}

at::Tensor gather_from(const at::Tensor& x, const Rows& rows);

at::Tensor scatter_to(const at::Tensor& x, const Rows& rows) {
  return region(
      kScatter,
      x,
      [&](const auto& value) { return own_rows(value, rows); },
      [=](const auto& grad) { return gather_from(grad, rows); });
}

at::Tensor gather_from(const at::Tensor& x, const Rows& rows) {
  return region(
      kGather,
      x,
      [&](const auto& value) {
        return all_gather_rows(value, rows.dim, rows.sizes, rows.group);
      },
      [=](const auto& grad) { return scatter_to(grad, rows); });
}

// ---- arguments --------------------------------------------------------------

/// Raises on all ranks where their tensors differ in more than values.
void agree_on_tensor(
    const char* op,
    const at::Tensor& x,
    const std::string& group) {
  agree_on_call(Group(group), x, [&]() -> Collective {
    const auto text =
        c10::str(op, " of a ", x.scalar_type(), " tensor ", x.sizes());
    return {text, "", {}, {}};
  });
}

/// In [0, dims), where it is one of x's.
int64_t wrapped(const char* op, int64_t dim, const at::Tensor& x) {
  TORCH_CHECK_INDEX(
      -x.dim() <= dim && dim < x.dim(),
      op,
      ": dim ",
      dim,
      " of ",
      x.dim(),
      " dims");
  return dim < 0 ? dim + x.dim() : dim;
}

/// The dim, not negative. Raises on all ranks where it does not have the rows
/// of all ranks, or this rank's.
int64_t agree_on_rows(
    const char* op,
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group_name,
    bool of_all) {
  const Group group(group_name);
  agree_on_call(group, x, [&] {
    dim = wrapped(op, dim, x);
    check_splits(op, "sizes", sizes, group);
    check_extent(op, x, dim, of_all ? sum(sizes) : sizes[group.rank()]);
    return with_sizes(op, x, dim, sizes);
  });
  return dim;
}

} // namespace

at::Tensor copy_to_parallel_region(
    const at::Tensor& x,
    const std::string& group) {
  agree_on_tensor(kCopy, x, group);
  return copy_to(x, group);
}

at::Tensor reduce_from_parallel_region(
    const at::Tensor& x,
    const std::string& group) {
  agree_on_tensor(kReduce, x, group);
  return reduce_from(x, group);
}

at::Tensor scatter_to_parallel_region(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group) {
  dim = agree_on_rows(kScatter, x, dim, sizes, group, /*of_all=*/true);
  return scatter_to(x, {dim, sizes.vec(), group});
}

at::Tensor gather_from_parallel_region(
    const at::Tensor& x,
    int64_t dim,
    c10::IntArrayRef sizes,
    const std::string& group) {
  dim = agree_on_rows(kGather, x, dim, sizes, group, /*of_all=*/false);
  return gather_from(x, {dim, sizes.vec(), group});
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("copy_to_parallel_region", copy_to_parallel_region);
  m.impl("reduce_from_parallel_region", reduce_from_parallel_region);
  m.impl("scatter_to_parallel_region", scatter_to_parallel_region);
  m.impl("gather_from_parallel_region", gather_from_parallel_region);
}

} // namespace shardtensor
