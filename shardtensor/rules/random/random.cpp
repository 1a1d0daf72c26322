#include <limits>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/native/DistributionTemplates.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/rules/random/counter_numbers.h"
#include "shardtensor/rules/random/random_whole.h"
#include "shardtensor/tensor/random.h"

// Note [Random numbers]
// By default random numbers are those of one device with the same seed, in any
// layout: every rank, whose generator is in the same state, draws for the whole
// tensor and keeps its own part. All generators advance alike and nothing is
// sent. The price is the time to draw the whole tensor, and memory for it
// meanwhile. Drawing only the own part would not give the same numbers:
// PyTorch's kernels draw in blocks (normal_), seed a stream per call
// (bernoulli_) or deal the numbers out by the launch's size (CUDA). The policy
// "counter" gives these numbers up: see Note [Counter numbers].
//
// Generators start alike in every process and stay so until a rank draws alone;
// torch.manual_seed on all ranks makes them alike again. The check mode
// compares them.
//
// Here are the operators that do not read what they are given, and one loop
// over all of them; random_elements.cpp has the others.

namespace shardtensor::detail {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;
using Kind = Distribution::Kind;

/// An operator and what it draws; its first arguments but the tensor are the
/// distribution's parameters.
struct RandomOperator {
  const char* name;
  Kind kind;
  size_t parameters;
};

/// A boxed call's arguments.
class Arguments {
 public:
  Arguments(const OperatorHandle& op, Stack& stack)
      : op_(op),
        stack_(stack),
        base_(stack.size() - op.schema().arguments().size()),
        count_(op.schema().arguments().size()) {}

  c10::IValue& operator[](size_t index) const {
    return stack_[base_ + index];
  }
  /// Null where the operator has no such argument.
  c10::IValue* find(const char* name) const {
    const auto index = op_.schema().argumentIndexWithName(name);
    return index ? &(*this)[*index] : nullptr;
  }
  std::optional<at::Generator> generator() const {
    const auto* value = find("generator");
    return value && value->isGenerator() ? std::optional(value->toGenerator())
                                         : std::nullopt;
  }
  /// randint_like's high is a number in a tensor.
  void make_numbers_plain() const {
    for (size_t i = 1; i < count_; ++i) {
      auto& value = (*this)[i];
      if (value.isTensor() && is_shard_tensor(value.toTensor())) {
        const auto tensor = value.toTensor();
        value = local_of(tensor, replicated(spec(tensor))).tensor;
      }
    }
  }

 private:
  const OperatorHandle& op_;
  Stack& stack_;
  size_t base_;
  size_t count_;
};

// ---- distributions ----------------------------------------------------------

/// The largest integer that random_ draws into this dtype.
int64_t largest_integer(at::ScalarType dtype) {
  if (at::isFloatingType(dtype)) {
    int64_t digits = 0;
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, dtype, "random_", [&] {
          digits = std::numeric_limits<scalar_t>::digits;
        });
    return int64_t{1} << digits;
  }
  int64_t largest = 1;
  AT_DISPATCH_V2(
      dtype,
      "random_",
      AT_WRAP([&] {
        largest = static_cast<int64_t>(std::numeric_limits<scalar_t>::max());
      }),
      at::kBool,
      AT_EXPAND(AT_INTEGRAL_TYPES_V2));
  return largest;
}

/// Floats cannot tell all integers apart: within the bounds after rounding.
void round_bounds(at::ScalarType dtype, int64_t& from, int64_t& to) {
  if (at::isFloatingType(dtype)) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, dtype, "random_", [&] {
          from = at::native::templates::update_from<scalar_t>(from);
          to = at::native::templates::update_to<scalar_t>(to);
        });
  }
}

int64_t integer_of(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item<int64_t>() : value.toInt();
}

/// In [from, to); without `to` up to the largest. The number of integers wraps
/// to 0 where it is 2^64.
Distribution integers(
    const Arguments& arguments,
    size_t parameters,
    at::ScalarType dtype) {
  Distribution drawn{Kind::Integer};
  const auto& last = arguments[parameters];
  if (parameters == 2) {
    drawn.from = integer_of(arguments[1]);
  }
  if (parameters == 0 || last.isNone()) {
    drawn.range = static_cast<uint64_t>(largest_integer(dtype)) -
        static_cast<uint64_t>(drawn.from) + 1;
    return drawn;
  }
  auto to = integer_of(last);
  round_bounds(dtype, drawn.from, to);
  drawn.range = static_cast<uint64_t>(to) - static_cast<uint64_t>(drawn.from);
  return drawn;
}

Distribution distribution_of(
    const RandomOperator& random,
    const Arguments& arguments,
    at::ScalarType dtype) {
  if (random.kind == Kind::Integer) {
    return integers(arguments, random.parameters, dtype);
  }
  Distribution drawn{random.kind};
  if (random.parameters > 0) {
    drawn.a = arguments[1].toDouble();
  }
  if (random.parameters > 1) {
    drawn.b = arguments[2].toDouble();
  }
  return drawn;
}

/// The operator on no elements, in PyTorch's kernel: its checks of the
/// arguments, and the result's dtype. Nobody else's generator is touched.
at::ScalarType check_arguments(
    const OperatorHandle& op,
    const Stack& stack,
    const at::Tensor& local) {
  static const at::Generator unused = at::detail::createCPUGenerator();
  const c10::impl::ExcludeDispatchKeyGuard untraced(
      c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const auto count = op.schema().arguments().size();
  Stack copy(stack.end() - static_cast<int64_t>(count), stack.end());
  const Arguments arguments(op, copy);
  arguments[0] = at::empty({0}, at::TensorOptions(local.dtype()));
  for (const char* name : {"device", "pin_memory", "memory_format"}) {
    if (auto* value = arguments.find(name)) {
      *value = c10::IValue();
    }
  }
  if (auto* generator = arguments.find("generator")) {
    *generator = unused;
  }
  op.callBoxed(&copy);
  return copy.back().toTensor().scalar_type();
}

// ---- kernels ----------------------------------------------------------------

class RandomKernel : public c10::OperatorKernel {
 public:
  explicit RandomKernel(RandomOperator random) : random_(random) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const Arguments arguments(op, *stack);
    const auto self = arguments[0].toTensor();
    const auto name = c10::toString(op.operator_name());
    check_generators(name, arguments.generator(), self);
    arguments.make_numbers_plain();
    const bool is_in_place = op.schema().arguments()[0].alias_info();
    if (random_policy() == RandomPolicy::OneDevice) {
      note_whole_draw(name, self, *spec(self));
      is_in_place ? draw_whole_in_place(op, stack, self)
                  : draw_whole(op, stack, self);
    } else {
      is_in_place ? draw_own_in_place(op, stack, self)
                  : draw_own(op, stack, self);
    }
  }

 private:
  void draw_whole_in_place(
      const OperatorHandle& op,
      Stack* stack,
      const at::Tensor& self) const {
    const auto whole = empty_whole(self);
    Arguments(op, *stack)[0] = whole;
    op.callBoxed(stack);
    keep_own_part(self, whole);
    stack->back() = self;
  }

  void draw_whole(
      const OperatorHandle& op,
      Stack* stack,
      const at::Tensor& self) const {
    Arguments(op, *stack)[0] = empty_whole(self);
    op.callBoxed(stack);
    const auto whole = stack->back().toTensor();
    const auto target = without_partial(spec(self));
    stack->back() = wrap(own_part(whole, target), target, whole.strides());
  }

  void draw_own_in_place(
      const OperatorHandle& op,
      Stack* stack,
      const at::Tensor& self) const {
    const Arguments arguments(op, *stack);
    const auto dtype = check_arguments(op, *stack, impl_of(self)->local());
    const auto drawn = distribution_of(random_, arguments, dtype);
    const auto key = draw_key(impl_of(self)->local(), arguments.generator());
    fill_own_part(self, key, drawn);
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->emplace_back(self);
  }

  void draw_own(const OperatorHandle& op, Stack* stack, const at::Tensor& self)
      const {
    const Arguments arguments(op, *stack);
    const auto& local = impl_of(self)->local();
    const auto dtype = check_arguments(op, *stack, local);
    const auto drawn = distribution_of(random_, arguments, dtype);
    const auto target = without_partial(spec(self));
    // bernoulli.p alone gives a contiguous result, whatever self is.
    const auto strides = random_.kind == Kind::Bernoulli
        ? std::vector<int64_t>()
        : nominal_strides(
              Call(op, *stack), strides_of_elements, target->sizes());
    const auto key = draw_key(local, arguments.generator());
    auto own = counter_numbers(
        target->local_sizes(), dtype, key, drawn, global_index(*target));
    if (const auto* device = arguments.find("device");
        device && device->isDevice()) {
      own = own.to(device->toDevice());
    }
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->emplace_back(wrap(own, target, strides));
  }

  RandomOperator random_;
};

/// Functional in-place operators among them: what torch.compile makes of those.
constexpr RandomOperator kRandomOperators[] = {
    {"bernoulli_.float", Kind::Bernoulli, 1},
    {"bernoulli.p", Kind::Bernoulli, 1},
    {"cauchy_", Kind::Cauchy, 2},
    {"cauchy", Kind::Cauchy, 2},
    {"exponential_", Kind::Exponential, 1},
    {"exponential", Kind::Exponential, 1},
    {"geometric_", Kind::Geometric, 1},
    {"geometric", Kind::Geometric, 1},
    {"log_normal_", Kind::LogNormal, 2},
    {"log_normal", Kind::LogNormal, 2},
    {"normal_", Kind::Normal, 2},
    {"normal_functional", Kind::Normal, 2},
    {"random_", Kind::Integer, 0},
    {"random_.from", Kind::Integer, 2},
    {"random_.to", Kind::Integer, 1},
    {"random", Kind::Integer, 0},
    {"random.from", Kind::Integer, 2},
    {"random.to", Kind::Integer, 1},
    {"uniform_", Kind::Uniform, 2},
    {"uniform", Kind::Uniform, 2},
    {"rand_like", Kind::Uniform, 0},
    {"rand_like.generator", Kind::Uniform, 0},
    {"randn_like", Kind::Normal, 0},
    {"randn_like.generator", Kind::Normal, 0},
    {"randint_like", Kind::Integer, 1},
    {"randint_like.generator", Kind::Integer, 1},
    {"randint_like.low_dtype", Kind::Integer, 2},
    {"randint_like.low_generator_dtype", Kind::Integer, 2},
    {"randint_like.Tensor", Kind::Integer, 1},
    {"randint_like.Tensor_generator", Kind::Integer, 1},
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  for (const auto& random : kRandomOperators) {
    m.impl(
        random.name,
        torch::CppFunction::makeFromBoxedFunctor(
            std::make_unique<RandomKernel>(random)));
  }
}

} // namespace shardtensor::detail
