#include "shardtensor/tensor/terms.h"

#include <algorithm>
#include <numeric>

#include <ATen/ops/cat.h>
#include <c10/util/accumulate.h>

#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/layout/plans/merge_plan.h"
#include "shardtensor/layout/plans/plan_cache.h"
#include "shardtensor/tensor/redistribute.h"

namespace shardtensor::detail {

at::Tensor gather_terms(
    const at::Tensor& local,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes) {
  auto sizes = spec->sizes();
  sizes.insert(sizes.begin(), spec->mesh()->ranks(axes));
  std::vector<int64_t> from(spec->dim() + 1);
  std::iota(from.begin(), from.end(), -1);
  const auto stacked = with_dims(spec, std::move(sizes), from);
  auto apart = stacked->placements();
  auto together = stacked->placements();
  for (const int64_t axis : axes) {
    apart[axis] = Placement::shard(0);
    together[axis] = Placement::replicate();
  }
  return redistribute_local(
      local.unsqueeze(0),
      with_placements(stacked, std::move(apart)),
      with_placements(stacked, std::move(together)));
}

namespace {

/// This rank's exchanges of one merge.
using MergeExchanges = std::vector<EncodedExchange>;

/// What a merge is among: the positions that differ on `axes` alone.
struct Among {
  const Mesh& mesh;
  const std::vector<int64_t>& axes;

  int64_t pieces() const {
    return mesh.ranks(axes);
  }
  /// The inverse of Mesh::piece, for positions that share this rank's terms.
  int64_t position_of(int64_t piece) const {
    int64_t position = mesh.position();
    for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
      position =
          mesh.with_coordinate(position, *axis, piece % mesh.ranks(*axis));
      piece /= mesh.ranks(*axis);
    }
    return position;
  }
};

/// The elements of any position's term, at most.
int64_t largest_term(const ShardSpec& spec) {
  int64_t elements = 1;
  for (int64_t dim = 0; dim < spec.dim(); ++dim) {
    elements *= spec.is_sharded(dim)
        ? std::ranges::max(spec.partition(dim).local_extents())
        : spec.size(dim);
  }
  return elements;
}

/// Whether a piece is what a rank of the exchange's group is.
bool are_a_group(const Among& among) {
  return among.axes.size() == 1 ||
      (among.pieces() == among.mesh.ranks() &&
       std::is_sorted(among.axes.begin(), among.axes.end()));
}

/// Of a row of `elements` each.
ExchangePlan plan_step(
    const MergeStep& step,
    const Among& among,
    int64_t elements) {
  const int64_t own = among.mesh.position();
  const auto row = [&](int64_t at) { return Box{{at, at + 1}, {0, elements}}; };
  const auto terms = static_cast<int64_t>(step.sources.size());
  ExchangePlan plan;
  plan.source_sizes = {1, elements};
  plan.target_sizes = {terms, elements};
  plan.covers = true;
  plan.gathers = terms == among.pieces() && are_a_group(among);
  for (const int64_t receiver : step.receivers) {
    plan.sends.push_back({own, among.position_of(receiver), row(0), row(0)});
  }
  for (int64_t term = 0; term < terms; ++term) {
    const int64_t source = among.position_of(step.sources[term]);
    plan.receives.push_back({source, own, row(0), row(term)});
    if (source == own) {
      plan.sends.push_back(plan.receives.back());
    }
  }
  return plan;
}

MergeExchanges plan_exchanges(
    const ShardSpec& spec,
    const std::vector<int64_t>& axes,
    int64_t tensors) {
  const Among among{*spec.mesh(), axes};
  const int64_t pieces = among.pieces();
  const auto elements = tensors * c10::multiply_integers(spec.local_sizes());
  MergeExchanges exchanges;
  for (const MergeStep& step :
       plan_merge(pieces, among.mesh.piece(among.mesh.position(), axes))) {
    auto plan = plan_step(step, among, elements);
    plan.axis = axes.size() == 1 ? axes[0] : -1;
    plan.largest_message = pieces > 1 ? tensors * largest_term(spec) : 0;
    plan.peers = std::min(pieces, kMostTerms);
    exchanges.push_back(encode(plan, among.mesh));
  }
  return exchanges;
}

std::shared_ptr<const MergeExchanges> find_exchanges(
    const SpecPtr& spec,
    const std::vector<int64_t>& axes,
    size_t tensors) {
  static PlanCache<MergeExchanges> plans;
  const auto count = static_cast<int64_t>(tensors);
  PlanKey key;
  key.add(spec).add(axes).add(count);
  return plans.find(key, [&] { return plan_exchanges(*spec, axes, count); });
}

/// Tensors that travel in one message.
struct Packed {
  std::vector<size_t> places; // among the terms
  std::shared_ptr<const MergeExchanges> exchanges;
};

std::vector<Packed> pack_by_dtype(
    const Terms& terms,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes) {
  std::vector<Packed> result;
  for (size_t i = 0; i < terms.size(); ++i) {
    auto fitting =
        std::find_if(result.begin(), result.end(), [&](const Packed& packed) {
          return terms[packed.places[0]].scalar_type() ==
              terms[i].scalar_type();
        });
    if (fitting == result.end()) {
      fitting = result.insert(fitting, Packed{});
    }
    fitting->places.push_back(i);
  }
  for (auto& packed : result) {
    packed.exchanges = find_exchanges(spec, axes, packed.places.size());
  }
  return result;
}

/// The other ranks' terms of one step, stacked with the own ones.
void exchange_terms(
    const Terms& own,
    const Packed& packed,
    size_t step,
    Terms& stacked) {
  std::vector<at::Tensor> flat;
  for (const size_t i : packed.places) {
    flat.push_back(own[i].reshape({1, -1}));
  }
  const auto together = flat.size() == 1 ? flat[0] : at::cat(flat, 1);
  const auto rows = exchange(together, packed.exchanges->at(step));
  int64_t begin = 0;
  for (const size_t i : packed.places) {
    auto sizes = own[i].sizes().vec();
    sizes.insert(sizes.begin(), rows.size(0));
    stacked[i] = rows.narrow(1, begin, own[i].numel()).reshape(sizes);
    begin += own[i].numel();
  }
}

} // namespace

Terms merge_terms(
    Terms own,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes,
    MergeTerms merge) {
  const auto& mesh = *spec->mesh();
  if (!mesh.contains_this_rank() || mesh.ranks(axes) == 1) {
    return own;
  }
  const auto packs = pack_by_dtype(own, spec, axes);
  for (size_t step = 0; step < packs[0].exchanges->size(); ++step) {
    Terms stacked(own.size());
    for (const auto& packed : packs) {
      exchange_terms(own, packed, step, stacked);
    }
    own = merge(stacked);
  }
  return own;
}

at::Tensor merge_terms(
    const at::Tensor& own,
    const SpecPtr& spec,
    const std::vector<int64_t>& axes,
    c10::function_ref<at::Tensor(const at::Tensor& stacked)> merge) {
  return merge_terms({own}, spec, axes, [&](const Terms& stacked) {
    return Terms{merge(stacked[0])};
  })[0];
}

} // namespace shardtensor::detail
