#include <limits>
#include <utility>

#include <ATen/Dispatch.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_dropout.h>
#include <ATen/ops/_sample_dirichlet.h>
#include <ATen/ops/_standard_gamma.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/binomial.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/min.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/native_dropout_backward.h>
#include <ATen/ops/poisson.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/dispatch/fallback.h"
#include "shardtensor/dispatch/kernel.h"
#include "shardtensor/dispatch/raise_together.h"
#include "shardtensor/rules/random/counter_numbers.h"
#include "shardtensor/rules/random/random_whole.h"
#include "shardtensor/tensor/random.h"

// Random operators whose arguments vary from element to element, see Note
// [Random numbers].

namespace shardtensor::detail {
namespace {

using Kind = Distribution::Kind;
using Generator = std::optional<at::Generator>;

bool draws_by_counter() {
  return random_policy() == RandomPolicy::Counter;
}

at::Tensor contiguous_like(const at::Tensor& tensor) {
  return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
}

// ---- bernoulli --------------------------------------------------------------

/// Where the whole tensor is drawn each element takes one number, whatever its
/// probability: the probabilities of the other ranks need not be known.
at::Tensor whole_bernoulli(
    const at::Tensor& self,
    const at::Tensor& probabilities,
    const Generator& generator) {
  const auto whole = empty_whole(self);
  if (!is_shard_tensor(probabilities)) {
    return whole.bernoulli_(probabilities, generator);
  }
  const auto given = probabilities.expand(self.sizes());
  const auto own = without_partial(spec(self));
  // In the given order of memory, by which a GPU deals out its numbers.
  const auto p = given.is_non_overlapping_and_dense()
      ? empty_whole(given)
      : at::empty(self.sizes(), impl_of(probabilities)->local().options());
  p.fill_(0.5);
  write_own_part(p, local_of(given, own).tensor, *own);
  return whole.bernoulli_(p, generator);
}

/// Before anything is drawn: a rank that stopped in the middle would draw other
/// numbers than the others from then on.
void check_probabilities(const at::Tensor& probabilities) {
  const auto own = is_shard_tensor(probabilities)
      ? local_of(probabilities)
      : Local{probabilities, nullptr};
  const auto& p = own.tensor;
  if (is_traced(p) || !p.is_cpu()) {
    return;
  }
  const auto check = [&] {
    TORCH_CHECK(
        p.ge(0).logical_and_(p.le(1)).all().item<bool>(),
        "expected probabilities between 0 and 1 (p_in >= 0 && p_in <= 1)");
  };
  raise_together("aten::bernoulli_", own.spec, check);
}

at::Tensor own_bernoulli(
    const at::Tensor& self,
    const at::Tensor& probabilities,
    const Generator& generator) {
  const auto target = without_partial(spec(self));
  const auto p = is_shard_tensor(probabilities)
      ? local_of(probabilities.expand(self.sizes()), target).tensor
      : probabilities;
  const auto& like = impl_of(self)->local();
  const auto numbers = counter_numbers(
      target->local_sizes(),
      p.scalar_type() == at::kDouble ? at::kDouble : at::kFloat,
      draw_key(like, generator),
      {Kind::Uniform},
      global_index(*target));
  return numbers.lt(p).to(like.scalar_type());
}

at::Tensor& bernoulli_tensor_kernel(
    at::Tensor& self,
    const at::Tensor& probabilities,
    Generator generator) {
  TORCH_CHECK_TYPE(
      is_shard_tensor(self),
      "bernoulli_: cannot write a sharded result into a plain tensor of sizes ",
      self.sizes(),
      "; write into a ShardTensor or use full_tensor()");
  check_generators("aten::bernoulli_", generator, self);
  check_probabilities(probabilities);
  if (draws_by_counter()) {
    write_local(
        self,
        own_bernoulli(self, probabilities, generator),
        without_partial(spec(self)));
    return self;
  }
  note_whole_draw("aten::bernoulli_", self, *spec(self));
  keep_own_part(self, whole_bernoulli(self, probabilities, generator));
  return self;
}

at::Tensor bernoulli_kernel(const at::Tensor& self, Generator generator) {
  return contiguous_like(self).bernoulli_(self, std::move(generator));
}

// ---- normal -----------------------------------------------------------------

void check_deviation(const at::Tensor& std) {
  TORCH_CHECK(
      std.numel() == 0 || std.is_meta() || at::min(std).item<double>() >= 0,
      "normal: expected standard deviations of at least 0, got ",
      at::min(std).item<double>());
}

/// Numbers of mean 0 and deviation 1, scaled and moved, as ATen does it.
at::Tensor standard_normal(
    const at::Tensor& like,
    at::IntArrayRef sizes,
    at::ScalarType dtype,
    const Generator& generator) {
  return at::empty_like(
             like.expand(sizes),
             like.options().dtype(dtype),
             at::MemoryFormat::Contiguous)
      .normal_(0, 1, generator);
}

at::Tensor normal_kernel(
    const at::Tensor& mean,
    const at::Tensor& std,
    Generator generator) {
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
    Generator generator) {
  return contiguous_like(mean).normal_(0, std, std::move(generator)).add_(mean);
}

at::Tensor normal_of_deviation_kernel(
    double mean,
    const at::Tensor& std,
    Generator generator) {
  check_deviation(std);
  return standard_normal(std, std.sizes(), std.scalar_type(), generator)
      .mul_(std)
      .add_(mean);
}

// ---- dropout ----------------------------------------------------------------

using Dropped = std::tuple<at::Tensor, at::Tensor>;

/// x * mask * scale; on devices by one kernel, which backward takes, too.
at::Tensor dropped(const at::Tensor& x, const at::Tensor& mask, double scale) {
  return x.is_cpu() || x.is_complex() || mask.scalar_type() != at::kBool
      ? x.mul(mask).mul_(scale)
      : at::native_dropout_backward(x, mask, scale);
}

/// The probability of an element to stay.
void check_kept(double kept) {
  TORCH_CHECK(
      kept >= 0 && kept <= 1,
      "dropout: expected a probability between 0 and 1, got ",
      1 - kept);
}

/// `kept`: the probability of an element to stay. `draw_mask` draws for the
/// whole tensor as the operator itself does.
template <class DrawMask>
Dropped drop(
    const at::Tensor& input,
    double kept,
    at::ScalarType mask_type,
    const Generator& generator,
    const DrawMask& draw_mask) {
  check_kept(kept);
  const auto [local, own] = local_of(input);
  at::Tensor mask;
  auto strides = input.strides().vec();
  if (draws_by_counter()) {
    mask = counter_numbers(
        own->local_sizes(),
        mask_type,
        draw_key(local, generator),
        {Kind::Bernoulli, kept},
        global_index(*own));
  } else {
    note_whole_draw("dropout", local, *own);
    const auto whole = draw_mask(empty_whole(input).fill_(1));
    strides = whole.strides().vec();
    mask = own_part(whole, own);
  }
  const double scale = kept == 0 ? 0 : 1 / kept;
  return {
      wrap(dropped(local, mask, scale), own, strides),
      wrap(mask, own, strides)};
}

Dropped native_dropout_kernel(
    const at::Tensor& input,
    double p,
    std::optional<bool> train) {
  check_generators("aten::native_dropout", {}, input);
  const auto [local, own] = local_of(input);
  // As one device has it, which draws its own numbers then. Of what lies where
  // kernels cannot load vectors CUDA draws others, and ranks may differ there.
  const bool is_whole = local.numel() > 0 && local.storage_offset() == 0 &&
      local.sizes().equals(input.sizes()) &&
      local.strides().equals(input.strides());
  if (!train.value_or(true)) {
    const auto [output, mask] = at::native_dropout(local, p, train);
    return {
        wrap(output, own, input.strides()), wrap(mask, own, input.strides())};
  }
  check_kept(1 - p);
  if (is_whole && !draws_by_counter()) {
    const auto [output, mask] = at::native_dropout(local, p, train);
    return {
        wrap(output, own, output.strides()), wrap(mask, own, mask.strides())};
  }
  return drop(input, 1 - p, at::kBool, {}, [&](const at::Tensor& ones) {
    return std::get<1>(at::native_dropout(ones, p, train));
  });
}

/// `p` is the probability to stay.
Dropped fused_dropout_kernel(
    const at::Tensor& input,
    double p,
    Generator generator) {
  check_generators("aten::_fused_dropout", generator, input);
  return drop(input, p, at::kByte, generator, [&](const at::Tensor& ones) {
    return std::get<1>(at::_fused_dropout(ones, p, generator));
  });
}

// ---- operators whose numbers depend on values -------------------------------

/// The whole tensor on every rank, row-major as the operators go over it;
/// counted and said as a fallback.
at::Tensor gathered(const char* op, const at::Tensor& self) {
  const auto& from = spec(self);
  if (from->is_sharded()) {
    note_fallback(op, from, replicated(from));
  }
  return local_of(self, replicated(from)).tensor.contiguous();
}

/// This rank's part of what an operator draws from all of `parameters`.
template <class Draw>
at::Tensor drawn_whole(
    const char* op,
    const at::Tensor& parameters,
    const Draw& draw) {
  const auto target = without_partial(spec(parameters));
  return wrap(own_part(draw(gathered(op, parameters)), target), target);
}

/// Samples of this rank's part; `b` has the sizes and the type of `a`.
at::Tensor own_samples(
    const char* op,
    Sample sample,
    const at::Tensor& a,
    const at::Tensor& b,
    const Generator& generator) {
  TORCH_CHECK(
      at::isFloatingType(a.scalar_type()),
      op,
      ": expected floating-point parameters, got ",
      a.scalar_type());
  const auto target = without_partial(spec(a));
  const auto local = local_of(a, target).tensor.contiguous();
  const auto other = a.is_same(b) ? local : local_of(b, target).tensor;
  return wrap(
      counter_samples(
          sample,
          local,
          other,
          draw_key(local, generator),
          global_index(*target)),
      target);
}

at::Tensor poisson_kernel(const at::Tensor& rates, Generator generator) {
  const CommScope scope("aten::poisson");
  check_generators("aten::poisson", generator, rates);
  if (draws_by_counter()) {
    return own_samples("poisson", Sample::Poisson, rates, rates, generator);
  }
  return drawn_whole("aten::poisson", rates, [&](const at::Tensor& whole) {
    return at::poisson(whole, generator);
  });
}

at::Tensor gamma_kernel(const at::Tensor& shapes, Generator generator) {
  const CommScope scope("aten::_standard_gamma");
  check_generators("aten::_standard_gamma", generator, shapes);
  if (draws_by_counter()) {
    return own_samples(
        "_standard_gamma", Sample::Gamma, shapes, shapes, generator);
  }
  const auto draw = [&](const at::Tensor& whole) {
    return at::_standard_gamma(whole, generator);
  };
  return drawn_whole("aten::_standard_gamma", shapes, draw);
}

/// The least and the largest number between 0 and 1.
std::pair<double, double> inside_unit(at::ScalarType dtype) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, dtype, "_sample_dirichlet", [] {
        using Limits = std::numeric_limits<scalar_t>;
        return std::pair(
            static_cast<double>(Limits::min()),
            1 - static_cast<double>(Limits::epsilon()) / 2);
      });
}

/// Gammas over their sum, in double for shapes whose gammas nearly vanish.
at::Tensor dirichlet_kernel(const at::Tensor& shapes, Generator generator) {
  const CommScope scope("aten::_sample_dirichlet");
  check_generators("aten::_sample_dirichlet", generator, shapes);
  const auto dtype = shapes.scalar_type();
  if (draws_by_counter()) {
    const auto [least, largest] = inside_unit(dtype);
    const auto gammas =
        at::_standard_gamma(shapes.to(at::kDouble), std::move(generator));
    return gammas.div(gammas.sum(-1, true)).clamp(least, largest).to(dtype);
  }
  const auto draw = [&](const at::Tensor& whole) {
    return at::_sample_dirichlet(whole, generator);
  };
  return drawn_whole("aten::_sample_dirichlet", shapes, draw);
}

at::Tensor binomial_kernel(
    const at::Tensor& counts,
    const at::Tensor& probabilities,
    Generator generator) {
  const CommScope scope("aten::binomial");
  TORCH_CHECK_VALUE(
      at::isFloatingType(counts.scalar_type()),
      "binomial: expected floating-point counts, got ",
      counts.scalar_type());
  TORCH_CHECK(
      counts.scalar_type() == probabilities.scalar_type(),
      "binomial: expected counts and probabilities of one type, got ",
      counts.scalar_type(),
      " and ",
      probabilities.scalar_type());
  // Both as one layout.
  const auto a = counts.add(at::zeros_like(probabilities));
  const auto b = probabilities.add(at::zeros_like(counts));
  check_generators("aten::binomial", generator, a);
  if (draws_by_counter()) {
    return own_samples("binomial", Sample::Binomial, a, b, generator);
  }
  return drawn_whole("aten::binomial", a, [&](const at::Tensor& whole) {
    return at::binomial(whole, gathered("aten::binomial", b), generator);
  });
}

void check_multinomial(
    const at::Tensor& weights,
    int64_t samples,
    bool replacement) {
  TORCH_CHECK(
      weights.dim() == 1 || weights.dim() == 2,
      "multinomial: expected weights of 1 or 2 dims, got ",
      weights.dim());
  TORCH_CHECK(
      at::isFloatingType(weights.scalar_type()),
      "multinomial: expected floating-point weights, got ",
      weights.scalar_type());
  TORCH_CHECK(
      samples > 0 && (replacement || samples <= weights.size(-1)),
      "multinomial: expected at least 1 sample, and without replacement at "
      "most ",
      weights.size(-1),
      " (one per category), got ",
      samples);
}

/// `local`: this rank's rows.
void check_weights(const at::Tensor& local, const SpecPtr& rows) {
  if (is_traced(local) || !local.is_cpu()) {
    return;
  }
  const auto check = [&] {
    TORCH_CHECK(
        local.ge(0).all().item<bool>() && local.isfinite().all().item<bool>() &&
            local.sum(-1).gt(0).all().item<bool>(),
        "expected finite weights of at least 0 with a sum above 0 in each row");
  };
  raise_together("aten::multinomial", rows, check);
}

/// Rows stay cut; the categories must be whole. Without replacement the
/// largest weights over exponential numbers win, as in PyTorch.
at::Tensor own_multinomial(
    const at::Tensor& weights,
    int64_t samples,
    bool replacement,
    const Generator& generator) {
  check_multinomial(weights, samples, replacement);
  const auto given = without_partial(spec(weights));
  const auto rows = without_shard(given, weights.dim() - 1);
  const auto local = local_of(weights, rows).tensor.contiguous();
  check_weights(local, rows);
  auto sizes = weights.sizes().vec();
  sizes.back() = samples;
  const auto target = with_sizes(rows, sizes);
  const auto key = draw_key(local, generator);
  const auto numbers = [&](Kind kind, const SpecPtr& layout) {
    return counter_numbers(
        layout->local_sizes(),
        local.scalar_type(),
        key,
        {kind, kind == Kind::Exponential ? 1.0 : 0.0},
        global_index(*layout));
  };
  at::Tensor chosen;
  if (replacement && samples > 1) {
    const auto sums = local.cumsum(-1);
    const auto total = sums.narrow(-1, sums.size(-1) - 1, 1);
    chosen = at::searchsorted(
                 sums, numbers(Kind::Uniform, target).mul_(total), false, true)
                 .clamp_max_(weights.size(-1) - 1);
  } else {
    const auto keys = local.div(numbers(Kind::Exponential, rows));
    chosen = samples == 1 ? keys.argmax(-1, true)
                          : std::get<1>(keys.topk(samples, -1));
  }
  return wrap(chosen, target);
}

at::Tensor multinomial_kernel(
    const at::Tensor& weights,
    int64_t samples,
    bool replacement,
    Generator generator) {
  const CommScope scope("aten::multinomial");
  check_generators("aten::multinomial", generator, weights);
  if (draws_by_counter()) {
    return own_multinomial(weights, samples, replacement, generator);
  }
  const auto whole = gathered("aten::multinomial", weights);
  // Without replacement numbers come in the order of the weights' memory.
  const auto in_order = at::empty_strided(
      whole.sizes(),
      at::infer_dense_strides(whole.sizes(), weights.strides()),
      whole.options());
  const auto result = at::multinomial(
      in_order.copy_(whole), samples, replacement, std::move(generator));
  return wrap(
      result, make_replicated(spec(weights)->mesh(), result.sizes().vec()));
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("bernoulli", bernoulli_kernel);
  m.impl("bernoulli_.Tensor", bernoulli_tensor_kernel);
  m.impl("normal.Tensor_Tensor", normal_kernel);
  m.impl("normal.Tensor_float", normal_of_mean_kernel);
  m.impl("normal.float_Tensor", normal_of_deviation_kernel);
  m.impl("native_dropout", native_dropout_kernel);
  m.impl("_fused_dropout", fused_dropout_kernel);
  m.impl("poisson", poisson_kernel);
  m.impl("_standard_gamma", gamma_kernel);
  m.impl("_sample_dirichlet", dirichlet_kernel);
  m.impl("binomial", binomial_kernel);
  m.impl("multinomial", multinomial_kernel);
}

} // namespace shardtensor::detail
