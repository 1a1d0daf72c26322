#include "shardtensor/collectives/ring.h"

#include <exception>
#include <utility>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "shardtensor/collectives/exchange_rows.h"
#include "shardtensor/comm/check.h"
#include "shardtensor/comm/group.h"
#include "shardtensor/comm/host_numbers.h"
#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/comm/primitives/exchange_code.h"
#include "shardtensor/comm/transforms.h"

namespace shardtensor {

using namespace detail;

namespace {

/// In [0, ranks), as Python's % has it.
int64_t modulo(int64_t rank, int64_t ranks) {
  return (rank % ranks + ranks) % ranks;
}

/// Another one for other sizes.
int64_t number_of(c10::IntArrayRef sizes) {
  uint64_t result = sizes.size();
  for (const auto size : sizes) {
    result = result * 1000003 + static_cast<uint64_t>(size);
  }
  return static_cast<int64_t>(result);
}

/// x goes `step` places on, what comes has receive_sizes.
EncodedExchange plan_step(
    const Group& group,
    int64_t step,
    c10::IntArrayRef sizes,
    c10::IntArrayRef receive_sizes) {
  const int64_t next = modulo(group.rank() + step, group.ranks());
  const int64_t last = modulo(group.rank() - step, group.ranks());
  const Box sent = whole_box(sizes);
  const Box received = whole_box(receive_sizes);
  ExchangePlan plan;
  plan.source_sizes = sizes.vec();
  plan.target_sizes = receive_sizes.vec();
  plan.sends.push_back({group.rank(), next, sent, sent});
  plan.receives.push_back({last, group.rank(), received, received});
  plan.covers = true;
  if (next != group.rank()) {
    plan.largest_message = std::nullopt; // nobody knows the others' sizes
  }
  return encode(std::move(plan), group);
}

void call(const std::function<void()>& work) {
  if (work) {
    work();
  }
}

/// Blocks come from one place further away at each stop, terms go back there.
class Tour {
 public:
  Tour(
      const at::Tensor& block,
      const std::vector<std::vector<int64_t>>& sizes,
      const std::string& group,
      const RingStops& stops)
      : block_(block.detach()), sizes_(sizes), group_(group), stops_(stops) {}

  void run() {
    at::Tensor next = fetch(1, [&] { call(stops_.own); });
    for (int64_t stop = 1; stop < group_.ranks(); ++stop) {
      const auto block = next;
      at::Tensor term;
      give_back(stop - 1, [&] {
        next =
            fetch(stop + 1, [&] { term = stops_.other(owner(stop), block); });
      });
      term_ = term;
    }
    give_back(group_.ranks() - 1, [&] { call(stops_.own_rest); });
  }

 private:
  using Meanwhile = c10::function_ref<void()>;

  int64_t owner(int64_t stop) const {
    return modulo(group_.rank() - stop, group_.ranks());
  }
  /// The block of the stop's owner; undefined after the last.
  at::Tensor fetch(int64_t stop, Meanwhile meanwhile) {
    if (stop >= group_.ranks()) {
      meanwhile();
      return {};
    }
    const auto step =
        plan_step(group_, stop, block_.sizes(), sizes_[owner(stop)]);
    return exchange_during(block_, step, meanwhile);
  }
  /// The term that the stop made goes to its owner.
  void give_back(int64_t stop, Meanwhile meanwhile) {
    if (stop == 0 || !stops_.returned) {
      meanwhile();
      return;
    }
    const auto step =
        plan_step(group_, -stop, sizes_[owner(stop)], block_.sizes());
    stops_.returned(exchange_during(term_, step, meanwhile));
  }

  at::Tensor block_;
  const std::vector<std::vector<int64_t>>& sizes_;
  Group group_;
  const RingStops& stops_;
  at::Tensor term_; // of the stop before
};

using BlockSizes = std::vector<std::vector<int64_t>>;

/// Every rank's, of as many dims.
BlockSizes gather_sizes(const at::Tensor& block, const Group& group) {
  const auto own = at::tensor(block.sizes(), at::kLong)
                       .to(group.device_of_numbers())
                       .unsqueeze(0);
  const std::vector<int64_t> one(group.ranks(), 1);
  const auto all = host_numbers(all_gather_rows(own, 0, one, group.name()));
  BlockSizes sizes;
  for (int64_t rank = 0; rank < group.ranks(); ++rank) {
    const auto begin = all.begin() + rank * block.dim();
    sizes.emplace_back(begin, begin + block.dim());
  }
  return sizes;
}

Collective tour_call(
    const char* name,
    const Group& group,
    const at::Tensor& block,
    const BlockSizes& sizes,
    const std::string& rest) {
  if (sizes.empty()) {
    return {
        c10::str(
            name,
            " of ",
            block.dim(),
            "-D ",
            block.scalar_type(),
            " blocks",
            rest),
        c10::str(", sizes ", block.sizes()),
        {},
        {}};
  }
  const auto count = static_cast<int64_t>(sizes.size());
  TORCH_CHECK_VALUE(
      count == group.ranks(),
      name,
      ": expected the sizes of ",
      group.ranks(),
      " blocks, one for each rank, got ",
      count);
  const c10::IntArrayRef own = sizes[group.rank()];
  TORCH_CHECK_VALUE(
      block.sizes() == own,
      name,
      ": expected a block of sizes ",
      own,
      ", as `sizes` say of this rank, got ",
      block.sizes());
  std::string all;
  for (const c10::IntArrayRef one : sizes) {
    all += c10::str(" ", one);
  }
  return {
      c10::str(
          name, " of ", block.scalar_type(), " blocks of sizes", all, rest),
      "",
      {},
      {}};
}

/// A rank's stops up to the first that raises. Then blocks stay unseen, and
/// terms are zero.
class CheckedStops {
 public:
  CheckedStops(const char* name, const RingStops& stops)
      : name_(name), stops_(stops) {}

  RingStops checked() {
    RingStops result;
    result.own = [this] { run([&] { call(stops_.own); }); };
    result.other = [this](int64_t owner, const at::Tensor& block) {
      at::Tensor term;
      run([&] {
        term = stops_.other(owner, block);
        check_term(term, block);
      });
      return stops_.returned && (error_ || !term.defined())
          ? at::zeros_like(block)
          : term;
    };
    if (stops_.returned) {
      result.returned = [this](const at::Tensor& term) {
        run([&] { stops_.returned(term); });
      };
    }
    result.own_rest = [this] { run([&] { call(stops_.own_rest); }); };
    return result;
  }

  /// Raises on every rank what a stop raised on one, there as it was.
  void agree(const Group& group, const at::Tensor& block) {
    try {
      agree_on_call(group, block, [&] {
        if (error_) {
          std::rethrow_exception(error_);
        }
        return Collective{c10::str("the end of ", name_), "", {}, {}};
      });
    } catch (...) {
      std::rethrow_exception(error_ ? error_ : std::current_exception());
    }
  }

 private:
  template <class Work>
  void run(const Work& work) {
    if (error_) {
      return;
    }
    try {
      work();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  /// Its owner expects as many bytes as the block has.
  void check_term(const at::Tensor& term, const at::Tensor& block) const {
    if (!stops_.returned || !term.defined()) {
      return;
    }
    TORCH_CHECK_VALUE(
        term.sizes() == block.sizes() &&
            term.scalar_type() == block.scalar_type() &&
            term.device() == block.device(),
        name_,
        ": expected a term as its block, ",
        block.sizes(),
        " of ",
        block.scalar_type(),
        " on ",
        block.device(),
        ", got ",
        term.sizes(),
        " of ",
        term.scalar_type(),
        " on ",
        term.device());
  }

  const char* name_;
  const RingStops& stops_;
  std::exception_ptr error_;
};

} // namespace

at::Tensor ring_step(
    const at::Tensor& x,
    int64_t step,
    c10::IntArrayRef receive_sizes,
    const std::string& group_name) {
  const Group group(group_name);
  agree_on_call(group, x, [&] {
    const int64_t next = modulo(group.rank() + step, group.ranks());
    const int64_t last = modulo(group.rank() - step, group.ranks());
    TORCH_CHECK_VALUE(
        next != group.rank() || x.sizes() == receive_sizes,
        "ring_step: a rank that sends to itself receives a tensor of sizes ",
        x.sizes(),
        ", receive_sizes is ",
        receive_sizes);
    return Collective{
        c10::str("ring_step of ", x.scalar_type(), " tensors by ", step),
        c10::str(", sizes ", x.sizes(), ", receive_sizes ", receive_sizes),
        {{next, number_of(x.sizes())}},
        {{last, number_of(receive_sizes)}}};
  });
  return exchange(x, plan_step(group, step, x.sizes(), receive_sizes));
}

void detail::ring_tour_of_agreed(
    const at::Tensor& block,
    const std::vector<std::vector<int64_t>>& sizes,
    const std::string& group,
    const RingStops& stops) {
  Tour(block, sizes, group, stops).run();
}

BlockSizes detail::ring_tour_as(
    const char* name,
    const at::Tensor& block,
    const BlockSizes& sizes,
    const std::string& group_name,
    const RingStops& stops,
    c10::function_ref<std::string()> note) {
  const Group group(group_name);
  {
    const OutsideTransforms of_all_levels;
    agree_on_call(group, values_inside(block), [&] {
      check_not_transformed(name, block);
      const auto* const terms = stops.returned ? ", with terms" : "";
      return tour_call(name, group, block, sizes, terms + note());
    });
  }
  auto all = sizes.empty() ? gather_sizes(block, group) : sizes;
  CheckedStops own(name, stops);
  ring_tour_of_agreed(block, all, group_name, own.checked());
  own.agree(group, block);
  return all;
}

void ring_tour(
    const at::Tensor& block,
    const std::vector<std::vector<int64_t>>& sizes,
    const std::string& group,
    const RingStops& stops) {
  ring_tour_as("ring_tour", block, sizes, group, stops);
}

TORCH_LIBRARY_IMPL(shardtensor, CompositeImplicitAutograd, m) {
  m.impl("ring_step", ring_step);
}

} // namespace shardtensor
