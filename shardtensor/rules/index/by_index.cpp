#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/div.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/where.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/dispatch/along_dim.h"
#include "shardtensor/dispatch/arguments/index_bounds.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/rules/index/element_rows.h"
#include "shardtensor/rules/index/row_exchange.h"
#include "shardtensor/rules/index/row_terms.h"

// Operators that read, or reduce into, the rows of one dim that an index names:
// gather, scatter and their kin. Where rows and index are cut along the same
// mesh axes, rows travel (Note [Rows by a cut index]); rows that every rank has
// are merged (Note [Rows that are made]); otherwise the dim is made whole.

namespace shardtensor::detail {
namespace {

constexpr auto& rows_rule =
    rule_with_strides<along_dim_rule, row_major_strides>;
constexpr auto& filled_rows_rule =
    rule_with_strides<along_dim_rule, strides_of_first>;

/// PyTorch's own check sees the sizes of one rank.
Decision added_rows_rule(Call& call) {
  const auto& self = call.operand(0).tensor;
  const auto& source = call.argument("source").toTensor();
  auto expected = self.sizes().vec();
  if (self.dim() > 0 && self.dim() == source.dim()) {
    const auto dim =
        at::maybe_wrap_dim(call.argument("dim").toInt(), self.dim());
    expected[dim] = source.size(dim);
  }
  TORCH_CHECK(
      self.dim() < 2 || source.sizes() == expected,
      call.name(),
      ": source tensor shape must match self tensor shape, excluding the "
      "specified dimension, got self of sizes ",
      self.sizes(),
      ", source of sizes ",
      source.sizes());
  return rows_rule(call);
}

// ---- the call ---------------------------------------------------------------

/// One call of any of these operators.
class ByIndex {
 public:
  ByIndex(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : schema_(op.schema()),
        first_(stack->size() - schema_.arguments().size()),
        stack_(*stack),
        name_(c10::toString(op.operator_name())) {}

  const std::string& name() const {
    return name_;
  }
  const at::Tensor& self() const {
    return at("self").toTensor();
  }
  const at::Tensor& index() const {
    return at("index").toTensor();
  }
  int64_t dim() const {
    return at::maybe_wrap_dim(
        at("dim").toInt(), std::max<int64_t>(self().dim(), 1));
  }
  /// Of that dim.
  int64_t extent() const {
    return self().dim() > 0 ? self().size(dim()) : 1;
  }
  bool reads() const {
    return !has("src") && !has("source") && !fills();
  }
  /// With one number.
  bool fills() const {
    return has("value") && !has("reduce");
  }
  at::Scalar value() const {
    return at("value").toScalar();
  }
  const at::Tensor& source() const {
    return at(has("src") ? "src" : "source").toTensor();
  }
  std::string reduce() const {
    return has("reduce") ? at("reduce").toStringRef() : "sum";
  }
  bool includes_self() const {
    return !has("include_self") || at("include_self").toBool();
  }
  at::Scalar alpha() const {
    return has("alpha") ? at("alpha").toScalar() : at::Scalar(1);
  }
  bool in_place() const {
    const auto* alias = schema_.arguments().front().alias_info();
    return alias != nullptr && alias->isWrite();
  }
  /// index_select and its kin: one dim, whatever the dims of self. gather's has
  /// those of self.
  bool index_is_of_rows() const {
    return name_.starts_with("aten::index_");
  }
  void finish(const at::Tensor& result) {
    torch::jit::drop(stack_, schema_.arguments().size());
    torch::jit::push(stack_, result);
  }

 private:
  bool has(const char* argument) const {
    return schema_.argumentIndexWithName(argument).has_value();
  }
  const c10::IValue& at(const char* argument) const {
    return stack_.at(first_ + *schema_.argumentIndexWithName(argument));
  }

  const c10::FunctionSchema& schema_;
  size_t first_;
  torch::jit::Stack& stack_;
  std::string name_;
};

/// The index as one of rows, if it is: of one dim, or the same along all others
/// as graph libraries expand it.
std::optional<at::Tensor> index_of_rows(const ByIndex& call) {
  const auto& self = call.self();
  const auto& index = call.index();
  const auto dim = call.dim();
  if (self.dim() == 0 || !is_shard_tensor(index)) {
    return {};
  }
  if (call.index_is_of_rows() || self.dim() == 1) {
    return index.dim() == 1 ? std::optional(index) : std::nullopt;
  }
  const auto dims = dims_of_rows(self, dim, index);
  if (!dims || dims->size() > 1) {
    return {};
  }
  auto sizes = self.sizes().vec();
  sizes[dim] = index.size(dim);
  if (index.sizes() != sizes) {
    return {};
  }
  return index_of_dims(index, *dims);
}

/// As PyTorch: index_fill takes int64 alone.
bool takes_type_of(const ByIndex& call, const at::Tensor& index) {
  return call.fills() && call.index_is_of_rows()
      ? index.scalar_type() == at::kLong
      : is_row_index(index);
}

bool source_has_a_row_for_each(const ByIndex& call, const at::Tensor& index) {
  auto sizes = call.self().sizes().vec();
  sizes.at(call.dim()) = index.size(0);
  return call.source().sizes() == sizes &&
      call.source().scalar_type() == call.self().scalar_type();
}

// ---- rows that travel -------------------------------------------------------

/// The reduction of self's own rows with what the source adds to them.
at::Tensor reduced(
    const ByIndex& call,
    const RowTerms& terms,
    const at::Tensor& self) {
  const auto reduce = call.reduce();
  const bool is_mean = reduce == "mean";
  const auto& rows = terms.rows;
  const auto counts = viewed_along(terms.counts, call.dim(), self.dim());
  const auto joined = [&] {
    if (!call.includes_self()) {
      return at::where(counts.gt(0), rows, self);
    }
    return reduce == "prod" ? self * rows
        : reduce == "amax"  ? at::maximum(self, rows)
        : reduce == "amin"  ? at::minimum(self, rows)
                            : self + rows;
  }();
  if (!is_mean) {
    return joined;
  }
  const auto divisors = (counts + (call.includes_self() ? 1 : 0)).clamp_min(1);
  return at::isIntegralType(self.scalar_type(), /*includeBool=*/true)
      ? at::div(joined, divisors, "floor").to(self.scalar_type())
      : at::div(joined, divisors.to(self.scalar_type()));
}

/// What `change` makes of self's own part in a layout is that of the result,
/// which shows these strides; told to write, it is that of self, which lies so.
void finish_with(
    ByIndex& call,
    const SpecPtr& layout,
    at::IntArrayRef strides,
    c10::function_ref<at::Tensor(const at::Tensor& own, bool writes)> change) {
  const auto& self = call.self();
  if (!call.in_place()) {
    const auto own = local_of(self, layout).tensor;
    call.finish(wrap(change(own, /*writes=*/false), layout, strides));
    return;
  }
  begin_row_write(self, layout);
  const LocalToWrite target(self, layout);
  change(target.local(), /*writes=*/true);
  target.finish();
  call.finish(at::Tensor(self));
}

/// As PyTorch: index_reduce has no sum.
void check_reduction(const std::string& op, const std::string& reduce) {
  TORCH_CHECK(
      !op.starts_with("aten::index_reduce") || reduce != "sum",
      op,
      ": Expected reduce to be one of prod, mean, amax or amin but got sum.");
}

// The next three do nothing and say so where another way is needed.

bool reads_rows(ByIndex& call, const at::Tensor& index) {
  const auto& self = call.self();
  const auto dim = call.dim();
  const auto own = without_partial(spec(self));
  const auto exchange = row_exchange(
      call.name().c_str(), index, own, dim, /*may_be_negative=*/false);
  if (!exchange) {
    return false;
  }
  const CommScope scope(call.name().c_str());
  call.finish(read_rows(*exchange, local_of(self, own).tensor, own, dim));
  return true;
}

bool reduces_rows(ByIndex& call, const at::Tensor& index) {
  const auto& self = call.self();
  const auto reduce = call.reduce();
  check_reduction(call.name(), reduce);
  const auto terms = row_terms(
      self,
      {call.name().c_str(),
       index,
       call.source(),
       call.dim(),
       reduce == "mean" ? "sum" : reduce,
       /*may_be_negative=*/false,
       /*counts=*/reduce != "sum" || !call.includes_self()});
  if (!terms) {
    return false;
  }
  const CommScope scope(call.name().c_str());
  const bool adds = reduce == "sum" && call.includes_self();
  finish_with(call, terms->layout, {}, [&](const at::Tensor& own, bool writes) {
    if (adds) {
      return writes ? own.add_(terms->rows, call.alpha())
                    : own.add(terms->rows, call.alpha());
    }
    const auto result = reduced(call, *terms, own);
    return writes ? own.copy_(result) : result;
  });
  return true;
}

/// The rows that are named become a number, by whom doesn't matter.
bool fills_rows(ByIndex& call, const at::Tensor& index) {
  const auto& self = call.self();
  RowReduction named{
      call.name().c_str(), index, at::Tensor(), call.dim(), "sum"};
  named.may_be_negative = call.index_is_of_rows();
  named.counts = true;
  const auto terms = row_terms(self, named);
  if (!terms) {
    return false;
  }
  const CommScope scope(call.name().c_str());
  const auto mask = viewed_along(terms->counts.gt(0), call.dim(), self.dim());
  // index_fill fills a copy, which lies as self.
  const auto strides = call.index_is_of_rows()
      ? at::infer_dense_strides(self.sizes(), self.strides())
      : std::vector<int64_t>();
  finish_with(call, terms->layout, strides, [&](const auto& own, bool writes) {
    return writes ? own.masked_fill_(mask, call.value())
                  : own.masked_fill(mask, call.value());
  });
  return true;
}

// ---- kernels ----------------------------------------------------------------

bool runs_by_rows(ByIndex& call) {
  if (!is_shard_tensor(call.self())) {
    return false;
  }
  const auto index = index_of_rows(call);
  if (!index || !takes_type_of(call, *index) ||
      (!call.reads() && !call.fills() &&
       !source_has_a_row_for_each(call, *index))) {
    return false;
  }
  return call.fills() ? fills_rows(call, *index)
      : call.reads()  ? reads_rows(call, *index)
                      : reduces_rows(call, *index);
}

// See Note [Indices out of bounds].

/// Of gather and scatter.
void check_element_index(const ByIndex& call) {
  check_gather_index(call.name(), call.index(), call.dim(), call.extent());
}

/// Of one dim's rows. CUDA's index_select of no rows takes any type.
void check_row_index(const ByIndex& call) {
  TORCH_CHECK_INDEX(
      !call.reads() || is_row_index(call.index()),
      "index_select(): Expected dtype int32 or int64 for index, got ",
      call.index().scalar_type());
  check_index(
      call.name(),
      call.index(),
      call.dim(),
      call.extent(),
      /*may_be_negative=*/call.fills());
}

/// How self lies where its other dims are cut as those of the source; null
/// where that says nothing of them.
SpecPtr layout_beside_source(const ByIndex& call) {
  const auto& self = call.self();
  if (call.fills() || !is_shard_tensor(call.source())) {
    return nullptr;
  }
  const auto source = without_partial(spec(call.source()));
  if (source->mesh() != spec(self)->mesh() || source->dim() != self.dim()) {
    return nullptr;
  }
  std::vector<int64_t> from;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    const bool fits = dim != call.dim() && source->size(dim) == self.size(dim);
    from.push_back(fits ? dim : -1);
  }
  return with_dims(source, self.sizes().vec(), from);
}

/// Before a rule writes into it.
void begin_write_of(const ByIndex& call) {
  if (call.in_place() && is_shard_tensor(call.self())) {
    begin_row_write(call.self(), layout_beside_source(call));
  }
}

template <Rule rule>
void by_rows_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  ByIndex call(op, stack);
  if (!runs_by_rows(call)) {
    check_row_index(call);
    begin_write_of(call);
    run_rule(op, rule, stack);
  }
}

void copy_rows_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  check_row_index(ByIndex(op, stack));
  run_rule(op, along_dim_rule, stack);
}

void gather_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  check_element_index(ByIndex(op, stack));
  run_rule(op, rows_rule, stack);
}

void gather_rows_kernel(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  ByIndex call(op, stack);
  if (!runs_by_rows(call)) {
    begin_write_of(call);
    check_element_index(call);
    run_rule(op, rows_rule, stack);
  }
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  for (const char* op :
       {"scatter.src",
        "scatter.reduce",
        "scatter.value_reduce",
        "scatter_.src",
        "scatter_.reduce",
        "scatter_.value_reduce"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&gather_kernel>());
  }
  for (const char* op :
       {"gather",
        "scatter.value",
        "scatter_.value",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce.two",
        "scatter_reduce_.two"}) {
    m.impl(
        op, torch::CppFunction::makeFromBoxedFunction<&gather_rows_kernel>());
  }
  m.impl(
      "index_select",
      torch::CppFunction::makeFromBoxedFunction<&by_rows_kernel<rows_rule>>());
  for (const char* op : {"index_fill.int_Scalar", "index_fill_.int_Scalar"}) {
    m.impl(
        op,
        torch::CppFunction::makeFromBoxedFunction<
            &by_rows_kernel<filled_rows_rule>>());
  }
  for (const char* op : {"index_copy", "index_copy_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&copy_rows_kernel>());
  }
  for (const char* op :
       {"index_add", "index_add_", "index_reduce", "index_reduce_"}) {
    m.impl(
        op,
        torch::CppFunction::makeFromBoxedFunction<
            &by_rows_kernel<added_rows_rule>>());
  }
}

} // namespace shardtensor::detail
