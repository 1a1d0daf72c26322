#include "shardtensor/comm/primitives/all_reduce.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "shardtensor/comm/autograd_node.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/check_mode.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/own_operator.h"
#include "shardtensor/comm/primitives/sum_in_place.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/stats.h"
#include "shardtensor/comm/wire.h"

namespace shardtensor {

using namespace detail;

namespace {

using torch::autograd::variable_list;

// ---- dtypes -----------------------------------------------------------------

void check_dtype(const at::Tensor& x, Reduce reduce) {
  const bool averages = reduce == Reduce::Avg;
  const bool adds = reduce == Reduce::Sum || averages;
  TORCH_CHECK_TYPE(
      adds || !x.is_complex(),
      "shardtensor::all_reduce: ",
      to_string(reduce),
      " of ",
      x.scalar_type(),
      ", expected sum or avg for complex tensors");
  TORCH_CHECK_TYPE(
      !averages || x.is_floating_point() || x.is_complex(),
      "shardtensor::all_reduce: avg of ",
      x.scalar_type(),
      ", expected a floating-point or complex tensor");
}

// ---- kernels ----------------------------------------------------------------

std::string describe(const at::Tensor& x, const std::string& reduce) {
  return c10::str(
      "shardtensor::all_reduce (",
      reduce,
      ") of a ",
      x.scalar_type(),
      " tensor ",
      x.sizes());
}

at::Tensor all_reduce_kernel(
    const at::Tensor& x,
    std::string reduce_name,
    std::string group_name) {
  const Reduce reduce = parse_reduce(reduce_name);
  check_dtype(x, reduce);
  const Group group(group_name);
  if (check_mode()) {
    check_same_call(group, x, {describe(x, reduce_name), "", {}, {}});
  }
  if (group.ranks() == 1 || x.numel() == 0) {
    return x.clone(at::MemoryFormat::Contiguous);
  }
  at::Tensor wire = to_wire(x, reduce);
  group.all_reduce(
      wire, wire_reduce(x, reduce), [&] { return describe(x, reduce_name); });
  count_all_reduce(static_cast<int64_t>(x.nbytes()));
  at::Tensor result = from_wire(wire, x, reduce);
  return reduce == Reduce::Avg ? result.div_(group.ranks()) : result;
}

/// The groups over which x is summed one after the other.
std::vector<std::string> groups_of(
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  if (static_cast<int64_t>(axes.size()) == mesh.axes()) {
    return {mesh.group()};
  }
  std::vector<std::string> groups;
  for (const auto axis : axes) {
    groups.push_back(mesh.group(axis));
  }
  return groups;
}

/// call(group, what it is), where there is something to sum; x is of a dtype
/// that travels as it is.
template <typename Call>
void sum_over_group(
    const at::Tensor& x,
    const std::string& group_name,
    Call call) {
  const std::string sum = to_string(Reduce::Sum);
  at::RecordFunction profiled(at::RecordScope::USER_SCOPE);
  if (profiled.isActive()) {
    profiled.before("shardtensor::all_reduce");
  }
  const Group group(group_name);
  if (check_mode()) {
    check_same_call(group, x, {describe(x, sum), "", {}, {}});
  }
  if (group.ranks() > 1 && x.numel() > 0) {
    call(group, [&] { return describe(x, sum); });
    count_all_reduce(static_cast<int64_t>(x.nbytes()));
  }
}

void sum_over_group(const at::Tensor& x, const std::string& group_name) {
  sum_over_group(x, group_name, [&](const Group& group, auto what) {
    group.all_reduce(x, Reduce::Sum, what);
  });
}

at::Tensor all_reduce_meta(const at::Tensor& x, std::string, std::string) {
  return at::empty_like(x, at::MemoryFormat::Contiguous);
}

// ---- autograd ---------------------------------------------------------------

using AllReduceSignature =
    at::Tensor(const at::Tensor&, std::string, std::string);

const auto& all_reduce_operator() {
  static const auto op =
      find_own_operator<AllReduceSignature>("shardtensor::all_reduce");
  return op;
}

void check_linear(const std::string& reduce) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_linear_reduce(parse_reduce(reduce)),
      "shardtensor::all_reduce: ",
      reduce,
      " has no derivative, only sum and avg have");
}

class AllReduceBackward : public torch::autograd::Node {
 public:
  AllReduceBackward(const std::string& reduce, const std::string& group)
      : reduce_(reduce), group_(group), scope_(current_comm_scope()) {}

  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined()) {
      return {at::Tensor()};
    }
    check_linear(reduce_);
    const CommScope scope(backward_of(scope_));
    return {all_reduce_operator().call(gradients[0], reduce_, group_)};
  }

 private:
  std::string reduce_;
  std::string group_;
  std::string scope_;
};

at::Tensor all_reduce_autograd(
    c10::DispatchKeySet keys,
    const at::Tensor& x,
    std::string reduce,
    std::string group) {
  at::Tensor result;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    result = all_reduce_operator().redispatch(
        keys & c10::after_autograd_keyset, x, reduce, group);
  }
  connect<AllReduceBackward>(result, x, reduce, group);
  const at::Tensor tangent = x._fw_grad(/*level=*/0);
  if (tangent.defined()) {
    check_linear(reduce);
    result._set_fw_grad(
        all_reduce_operator().call(tangent, reduce, group),
        /*level=*/0,
        /*is_inplace_op=*/false);
  }
  return result;
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeExplicitAutograd, m) {
  m.impl("all_reduce", all_reduce_kernel);
}
TORCH_LIBRARY_IMPL(shardtensor, Meta, m) {
  m.impl("all_reduce", all_reduce_meta);
}
TORCH_LIBRARY_IMPL(shardtensor, Autograd, m) {
  m.impl("all_reduce", all_reduce_autograd);
}

} // namespace

// ---- the C++ interface ------------------------------------------------------

at::Tensor all_reduce(
    const at::Tensor& x,
    Reduce reduce,
    const std::string& group) {
  if (Group(group).ranks() == 1) {
    return x;
  }
  return all_reduce_operator().call(x, to_string(reduce), group);
}

at::Tensor all_reduce(
    const at::Tensor& x,
    Reduce reduce,
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  if (static_cast<int64_t>(axes.size()) == mesh.axes()) {
    return all_reduce(x, reduce, mesh.group());
  }
  at::Tensor result = x;
  for (const auto axis : axes) {
    result = all_reduce(result, reduce, mesh.group(axis));
  }
  return result;
}

void detail::sum_in_place(
    const at::Tensor& x,
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  for (const auto& group : groups_of(mesh, axes)) {
    sum_over_group(x, group);
  }
}

SumInPlace::SumInPlace(
    const at::Tensor& x,
    const Mesh& mesh,
    const std::vector<int64_t>& axes)
    : x_(x), later_(groups_of(mesh, axes)) {
  sum_over_group(x_, later_.at(0), [&](const Group& group, auto what) {
    started_ = group.start_all_reduce(x_, Reduce::Sum, what());
  });
  later_.erase(later_.begin());
}

void SumInPlace::wait() {
  started_.wait();
  for (const auto& group : later_) {
    sum_over_group(x_, group);
  }
}

} // namespace shardtensor
