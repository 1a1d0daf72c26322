#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/min.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rrelu_with_noise.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/hash.h>
#include <torch/library.h>

#include "shardtensor/comm/collectives.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/layout/view_plan.h"

// Note [Random numbers]
// Random numbers are those of one device with the same seed, in any layout:
// every rank, whose generator is in the same state, draws for the whole tensor
// and keeps its own part. All generators advance alike and nothing is sent. The
// price is the time to draw the whole tensor, and memory for it meanwhile.
// Drawing only the own part would not give the same numbers: PyTorch's kernels
// draw in blocks (normal_), seed a stream per call (bernoulli_) or deal the
// numbers out by the launch's size (CUDA).
//
// Generators start alike in every process and stay so until a rank draws alone;
// torch.manual_seed on all ranks makes them alike again. The check mode
// compares them.

namespace shardtensor::detail {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

/// This rank's part of a tensor that every rank has; without the rest.
at::Tensor own_part(const at::Tensor& whole, const SpecPtr& spec) {
  const auto part = local_of(whole, spec).tensor;
  return spec->is_sharded() ? part.clone() : part;
}

/// A plain tensor of the global sizes, laid out in memory like `self` would be
/// on one device: numbers are drawn in the order of memory.
at::Tensor empty_whole(const at::Tensor& self) {
  return at::empty_strided(
      self.sizes(), self.strides(), impl_of(self)->local().options());
}

/// Brings the local tensor to where its rows stand in a tensor of the global
/// sizes; all else in there stays.
void write_own_part(at::Tensor whole, at::Tensor local, const ShardSpec& spec) {
  const auto dims = spec.sharded_dims();
  for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
    const auto& partition = spec.partition(*dim);
    const auto rows = spec.interval(*dim);
    whole = whole.unflatten(*dim, {partition.repeat(), partition.period()})
                .narrow(*dim + 1, rows.begin, rows.extent());
    local = local.unflatten(*dim, {partition.repeat(), rows.extent()});
  }
  whole.copy_(local);
}

// ---- the check mode ---------------------------------------------------------

at::Generator generator_or_default(
    const std::optional<at::Generator>& generator,
    at::Device device) {
  return generator && generator->defined()
      ? *generator
      : at::globalContext().defaultGenerator(device);
}

int64_t hash_of_state(const at::Generator& generator) {
  const auto state = generator.get_state();
  size_t hash = 0;
  for (const uint8_t byte :
       at::ArrayRef<uint8_t>(state.const_data_ptr<uint8_t>(), state.numel())) {
    hash = c10::hash_combine(hash, byte);
  }
  return static_cast<int64_t>(hash);
}

/// Raises on all ranks when their generators differ. Communication: two
/// all-reduces of a number, in the check mode only.
void check_generators(
    const std::string& op,
    const std::optional<at::Generator>& generator,
    const at::Tensor& self) {
  const auto& mesh = *spec(self)->mesh();
  if (!check_mode() || !mesh.contains_this_rank()) {
    return;
  }
  const auto& local = impl_of(self)->local();
  const auto hash = at::full(
      {1},
      hash_of_state(generator_or_default(generator, local.device())),
      local.options().dtype(at::kLong));
  TORCH_CHECK_VALUE(
      all_reduce(hash, Reduce::Max, mesh.group())
          .equal(all_reduce(hash, Reduce::Min, mesh.group())),
      op,
      ": expected random generators in the same state on all ranks, but they "
      "differ: seed them alike, and draw alike on every rank");
}

// ---- operators that do not read what they are given -------------------------

/// A boxed call's arguments.
class Arguments {
 public:
  Arguments(const OperatorHandle& op, Stack& stack)
      : stack_(stack),
        base_(stack.size() - op.schema().arguments().size()),
        count_(op.schema().arguments().size()) {}

  c10::IValue& operator[](size_t index) const {
    return stack_[base_ + index];
  }
  std::optional<at::Generator> generator() const {
    for (size_t i = 0; i < count_; ++i) {
      if ((*this)[i].isGenerator()) {
        return (*this)[i].toGenerator();
      }
    }
    return {};
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
  Stack& stack_;
  size_t base_;
  size_t count_;
};

/// What is drawn into `self`; a Partial becomes what it was drawn as.
void keep_own_part(const at::Tensor& self, const at::Tensor& whole) {
  const auto target = without_partial(spec(self));
  write_local(self, own_part(whole, target), target);
}

void random_in_place_kernel(
    const OperatorHandle& op,
    c10::DispatchKeySet,
    Stack* stack) {
  const Arguments arguments(op, *stack);
  const auto self = arguments[0].toTensor();
  check_generators(
      c10::toString(op.operator_name()), arguments.generator(), self);
  const auto whole = empty_whole(self);
  arguments[0] = whole;
  op.callBoxed(stack);
  keep_own_part(self, whole);
  stack->back() = self;
}

void random_like_kernel(
    const OperatorHandle& op,
    c10::DispatchKeySet,
    Stack* stack) {
  const Arguments arguments(op, *stack);
  const auto self = arguments[0].toTensor();
  check_generators(
      c10::toString(op.operator_name()), arguments.generator(), self);
  arguments.make_numbers_plain();
  arguments[0] = empty_whole(self);
  op.callBoxed(stack);
  const auto whole = stack->back().toTensor();
  const auto target = without_partial(spec(self));
  stack->back() = wrap(own_part(whole, target), target, whole.strides());
}

// ---- operators whose arguments vary from element to element -----------------

/// Each element takes one number, whatever its probability: the probabilities
/// of the other ranks need not be known.
at::Tensor& bernoulli_tensor_kernel(
    at::Tensor& self,
    const at::Tensor& probabilities,
    std::optional<at::Generator> generator) {
  TORCH_CHECK_TYPE(
      is_shard_tensor(self),
      "bernoulli_: cannot write a sharded result into a plain tensor of sizes ",
      self.sizes(),
      "; write into a ShardTensor or use full_tensor()");
  check_generators("aten::bernoulli_", generator, self);
  const auto whole = empty_whole(self);
  if (is_shard_tensor(probabilities)) {
    const auto given = probabilities.expand(self.sizes());
    const auto own = without_partial(spec(self));
    const auto p =
        at::full(self.sizes(), 0.5, impl_of(probabilities)->local().options());
    write_own_part(p, local_of(given, own).tensor, *own);
    whole.bernoulli_(p, generator);
  } else {
    whole.bernoulli_(probabilities, generator);
  }
  keep_own_part(self, whole);
  return self;
}

at::Tensor bernoulli_kernel(
    const at::Tensor& self,
    std::optional<at::Generator> generator) {
  return at::empty_like(self, self.options(), at::MemoryFormat::Contiguous)
      .bernoulli_(self, std::move(generator));
}

void check_deviation(const at::Tensor& std) {
  TORCH_CHECK(
      std.numel() == 0 || at::min(std).item<double>() >= 0,
      "normal: expected standard deviations of at least 0, got ",
      at::min(std).item<double>());
}

/// Numbers of mean 0 and deviation 1, scaled and moved, as ATen does it.
at::Tensor standard_normal(
    const at::Tensor& like,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    const std::optional<at::Generator>& generator) {
  return at::empty_like(
             like.expand(sizes),
             like.options().dtype(dtype),
             at::MemoryFormat::Contiguous)
      .normal_(0, 1, generator);
}

at::Tensor normal_kernel(
    const at::Tensor& mean,
    const at::Tensor& std,
    std::optional<at::Generator> generator) {
  check_deviation(std);
  const auto sizes = at::infer_size(mean.sizes(), std.sizes());
  const auto& like = is_shard_tensor(mean) && mean.sizes().equals(sizes) ? mean
      : is_shard_tensor(std)                                             ? std
                                                                         : mean;
  return standard_normal(like, sizes, mean.scalar_type(), generator)
      .mul_(std)
      .add_(mean);
}

at::Tensor normal_of_mean_kernel(
    const at::Tensor& mean,
    double std,
    std::optional<at::Generator> generator) {
  return at::empty_like(mean, mean.options(), at::MemoryFormat::Contiguous)
      .normal_(0, std, std::move(generator))
      .add_(mean);
}

at::Tensor normal_of_deviation_kernel(
    double mean,
    const at::Tensor& std,
    std::optional<at::Generator> generator) {
  check_deviation(std);
  return standard_normal(std, std.sizes(), std.scalar_type(), generator)
      .mul_(std)
      .add_(mean);
}

std::tuple<at::Tensor, at::Tensor> native_dropout_kernel(
    const at::Tensor& input,
    double p,
    std::optional<bool> train) {
  check_generators("aten::native_dropout", {}, input);
  const auto [local, own] = local_of(input);
  if (!train.value_or(true)) {
    const auto [output, mask] = at::native_dropout(local, p, train);
    return {
        wrap(output, own, input.strides()), wrap(mask, own, input.strides())};
  }
  const auto whole =
      std::get<1>(at::native_dropout(empty_whole(input).fill_(1), p, train));
  const auto mask = own_part(whole, own);
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  return {
      wrap(local.mul(mask).mul_(scale), own, whole.strides()),
      wrap(mask, own, whole.strides())};
}

// ---- rrelu ------------------------------------------------------------------

/// Elements in the order of one device.
struct Numbered {
  at::Tensor before; // how many of the chosen stand before each element
  int64_t count; // of the chosen on all ranks
};

/// `counts` along dim: what stands before each row, and the sum over the dim.
/// Communication: one all-reduce where the dim is cut.
std::pair<at::Tensor, at::Tensor> count_along(
    const at::Tensor& counts,
    int64_t dim,
    const ShardSpec& spec) {
  const auto before = counts.cumsum(dim) - counts;
  const auto own = counts.sum(dim);
  if (!spec.is_sharded(dim)) {
    return {before, own};
  }
  const auto piece = spec.piece(dim, spec.mesh()->position());
  auto sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), spec.partition(dim).pieces());
  auto pieces = at::zeros(sizes, own.options());
  pieces.select(0, piece).copy_(own);
  const auto all =
      all_reduce(pieces, Reduce::Sum, *spec.mesh(), spec.axes(dim));
  return {before + all.narrow(0, 0, piece).sum(0).unsqueeze(dim), all.sum(0)};
}

Numbered number_elements(const at::Tensor& chosen, const ShardSpec& spec) {
  auto counts = chosen.to(at::kLong);
  auto before = at::zeros_like(counts);
  for (int64_t dim = chosen.dim() - 1; dim >= 0; --dim) {
    auto [rows, total] = count_along(counts, dim, spec);
    for (int64_t inner = dim + 1; inner < chosen.dim(); ++inner) {
      rows = rows.unsqueeze(-1);
    }
    before += rows;
    counts = total;
  }
  return {before, counts.item<int64_t>()};
}

/// What each element of x is multiplied with, in the type of the product.
at::Tensor rrelu_slopes(
    const Local& x,
    const at::Scalar& lower,
    const at::Scalar& upper,
    const std::optional<at::Generator>& generator) {
  const auto negative = x.tensor.le(0);
  const auto type = at::toOpMathType(x.tensor.scalar_type());
  const auto options = x.tensor.options().dtype(type);
  auto slopes = at::ones(x.tensor.sizes(), options);
  if (!x.tensor.is_cpu()) {
    // A number for every element, whatever its value.
    const auto whole = at::full(x.spec->sizes(), -1, options);
    auto noise = at::empty_like(whole);
    at::rrelu_with_noise(whole, noise, lower, upper, true, generator);
    return at::where(negative, own_part(noise, x.spec), slopes);
  }
  // A number for every element that is not positive, one after the other.
  const auto numbered = number_elements(negative, *x.spec);
  const auto drawn = at::empty({numbered.count}, options.dtype(at::kDouble))
                         .uniform_(
                             at::ones({}, options).mul_(lower).item<double>(),
                             at::ones({}, options).mul_(upper).item<double>(),
                             generator)
                         .to(type);
  return slopes.masked_scatter_(
      negative, drawn.index_select(0, numbered.before.masked_select(negative)));
}

struct Rectified {
  at::Tensor output;
  at::Tensor noise;
};

Rectified rrelu(
    const at::Tensor& self,
    const at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    const std::optional<at::Generator>& generator) {
  const CommScope scope("aten::rrelu_with_noise");
  if (!training) {
    const auto slope = (lower.toDouble() + upper.toDouble()) / 2;
    return {at::leaky_relu(self, slope), noise};
  }
  check_generators("aten::rrelu_with_noise", generator, self);
  const auto x = local_of(self, contiguous(without_partial(spec(self))));
  const auto slopes = rrelu_slopes(x, lower, upper, generator);
  const auto dtype = self.scalar_type();
  return {
      wrap(x.tensor.to(slopes.scalar_type()).mul(slopes).to(dtype), x.spec),
      wrap(slopes.to(dtype), x.spec)};
}

at::Tensor rrelu_kernel(
    const at::Tensor& self,
    at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  const auto result = rrelu(self, noise, lower, upper, training, generator);
  noise.copy_(result.noise);
  return result.output;
}

at::Tensor& rrelu_in_place_kernel(
    at::Tensor& self,
    at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  return self.copy_(
      rrelu_kernel(self, noise, lower, upper, training, generator));
}

std::tuple<at::Tensor, at::Tensor> rrelu_functional_kernel(
    const at::Tensor& self,
    const at::Tensor& noise,
    const at::Scalar& lower,
    const at::Scalar& upper,
    bool training,
    std::optional<at::Generator> generator) {
  const auto result = rrelu(self, noise, lower, upper, training, generator);
  return {result.output, result.noise};
}

constexpr const char* kInPlace[] = {
    "bernoulli_.float",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "random_.from",
    "random_.to",
    "uniform_",
};

/// Functional in-place operators among them: what torch.compile makes of those.
constexpr const char* kLike[] = {
    "rand_like",
    "rand_like.generator",
    "randn_like",
    "randn_like.generator",
    "randint_like",
    "randint_like.generator",
    "randint_like.low_dtype",
    "randint_like.low_generator_dtype",
    "randint_like.Tensor",
    "randint_like.Tensor_generator",
    "bernoulli.p",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "normal_functional",
    "random",
    "random.from",
    "random.to",
    "uniform",
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  for (const char* name : kInPlace) {
    m.impl(
        name,
        torch::CppFunction::makeFromBoxedFunction<&random_in_place_kernel>());
  }
  for (const char* name : kLike) {
    m.impl(
        name, torch::CppFunction::makeFromBoxedFunction<&random_like_kernel>());
  }
  m.impl("bernoulli", bernoulli_kernel);
  m.impl("bernoulli_.Tensor", bernoulli_tensor_kernel);
  m.impl("native_dropout", native_dropout_kernel);
  m.impl("rrelu_with_noise", rrelu_kernel);
  m.impl("rrelu_with_noise_", rrelu_in_place_kernel);
  m.impl("rrelu_with_noise_functional", rrelu_functional_kernel);
  m.impl("normal.Tensor_Tensor", normal_kernel);
  m.impl("normal.Tensor_float", normal_of_mean_kernel);
  m.impl("normal.float_Tensor", normal_of_deviation_kernel);
}

} // namespace shardtensor::detail
