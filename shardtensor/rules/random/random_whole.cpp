#include "shardtensor/rules/random/random_whole.h"

#include <ATen/Context.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <c10/util/hash.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/kernel.h"

namespace shardtensor::detail {
namespace {

constexpr int64_t kSaidFrom = int64_t{64} << 20; // bytes

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

} // namespace

at::Tensor empty_whole(const at::Tensor& self) {
  return at::empty_strided(
      self.sizes(), self.strides(), impl_of(self)->local().options());
}

at::Tensor own_part(const at::Tensor& whole, const SpecPtr& spec) {
  const auto part = local_of(whole, spec).tensor;
  return spec->is_sharded() ? part.clone() : part;
}

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

void keep_own_part(const at::Tensor& self, const at::Tensor& whole) {
  const auto target = without_partial(spec(self));
  write_local(self, own_part(whole, target), target);
}

void note_whole_draw(
    const std::string& op,
    const at::Tensor& like,
    const ShardSpec& spec) {
  const auto bytes = spec.numel() * static_cast<int64_t>(like.element_size());
  if (bytes <= kSaidFrom || !spec.is_sharded()) {
    return;
  }
  TORCH_WARN_ONCE(
      op,
      ": drawing ",
      bytes >> 20,
      " MiB of random numbers for ",
      to_string(spec),
      ", as one device would, to keep a piece of them. "
      "set_random_policy('counter') draws the piece alone (other numbers, the "
      "same for any number of ranks). Said once.");
}

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

} // namespace shardtensor::detail
