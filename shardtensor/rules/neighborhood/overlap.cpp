#include "shardtensor/rules/neighborhood/overlap.h"

#include <algorithm>

#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/unsafe_split_with_sizes.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "shardtensor/comm/scope.h"
#include "shardtensor/rules/neighborhood/by_windows.h"
#include "shardtensor/rules/neighborhood/kernel.h"
#include "shardtensor/tensor/gradients/saved_inputs_node.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using OverlapPlan = std::shared_ptr<const NeighborhoodOverlap>;
using RowList = std::vector<int64_t>;

// ---- planning ---------------------------------------------------------------

/// Boxes of rows that are sent, of a tensor of these rows alone.
void keep_rows_that_are_sent(ExchangePlan& plan, RowList& sent) {
  for (const auto& transfer : plan.sends) {
    const auto& rows = transfer.source[1];
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      sent.push_back(row);
    }
  }
  std::sort(sent.begin(), sent.end());
  sent.erase(std::unique(sent.begin(), sent.end()), sent.end());
  for (auto& transfer : plan.sends) {
    auto& rows = transfer.source[1];
    const auto first = std::lower_bound(sent.begin(), sent.end(), rows.begin);
    rows = rows.shifted(first - sent.begin() - rows.begin);
  }
  plan.source_sizes[1] = static_cast<int64_t>(sent.size());
}

} // namespace

OverlapPlan plan_neighborhood_overlap(
    const SpecPtr& keys,
    const std::vector<NeighborhoodDim>& dims,
    std::vector<EncodedExchange> joined) {
  const auto& mesh = *keys->mesh();
  const auto rows = [&](int64_t, int64_t position) {
    auto dim = dims[0];
    dim.queries = keys->interval(1, position);
    return RowSource(rows_of_others(dim));
  };
  auto plan = std::make_shared<NeighborhoodOverlap>();
  plan->dims = dims;
  plan->parts = split_by_owner(dims[0]);
  auto slab = plan_gather_rows(keys, {1}, rows, mesh.position());
  keep_rows_that_are_sent(slab, plan->sent);
  plan->bring = encode(slab, mesh);
  plan->bring_back = adjoint(plan->bring);
  plan->joined = std::move(joined);
  return plan;
}

std::pair<Tensor, Tensor> join_rows(
    const Tensor& key,
    const Tensor& value,
    const std::vector<EncodedExchange>& joined) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  if (joined.size() == 2) {
    return {exchange(key, joined[0]), exchange(value, joined[1])};
  }
  const auto rows = exchange(at::cat({key, value}, -1), joined[0]);
  // Narrowed, each would have its gradient padded with zeros.
  const auto parts =
      at::unsafe_split_with_sizes(rows, {key.size(-1), value.size(-1)}, -1);
  return {parts[0], parts[1]};
}

namespace {

// ---- rows of the first domain dim -------------------------------------------

Tensor index_of_rows(const RowList& rows) {
  return at::tensor(rows, at::kLong);
}

bool follow_each_other(const RowList& rows) {
  return rows.empty() ||
      rows.back() - rows.front() + 1 == static_cast<int64_t>(rows.size());
}

/// A view where that is possible.
Tensor named_rows(const Tensor& x, const RowList& rows) {
  return follow_each_other(rows) ? x.narrow(
                                       1,
                                       rows.empty() ? 0 : rows.front(),
                                       static_cast<int64_t>(rows.size()))
                                 : x.index_select(1, index_of_rows(rows));
}

void add_to_rows(const Tensor& x, const RowList& rows, const Tensor& more) {
  if (follow_each_other(rows)) {
    named_rows(x, rows).add_(more);
  } else {
    x.index_add_(1, index_of_rows(rows), more.to(x.scalar_type()));
  }
}

// ---- one part ---------------------------------------------------------------

/// Everything of one rank, whole.
struct OverlappedPiece {
  const NeighborhoodOverlap& plan;
  double scale;
  Tensor query;
  Tensor key;
  Tensor value;
  NeighborhoodOutput attended;

  Tensor queries_of(const Tensor& x, const NeighborhoodPart& part) const {
    const auto& queries = part.dim.queries;
    return x.narrow(
        1, queries.begin - plan.dims[0].queries.begin, queries.extent());
  }
  NeighborhoodOutput attended_by(const NeighborhoodPart& part) const {
    return {
        queries_of(attended.output, part), queries_of(attended.log_sum, part)};
  }
  std::vector<NeighborhoodDim> dims_of(const NeighborhoodPart& part) const {
    auto dims = plan.dims;
    dims[0] = part.dim;
    return dims;
  }
};

bool is_inner(const NeighborhoodPart& part) {
  return part.before.empty() && part.after.empty();
}

/// All keys or values that a part sees.
Tensor seen_by(
    const NeighborhoodPart& part,
    const Tensor& own,
    const Tensor& slab) {
  const auto mine = named_rows(own, part.own);
  return is_inner(part)
      ? mine
      : at::cat(
            {named_rows(slab, part.before), mine, named_rows(slab, part.after)},
            1);
}

std::vector<Tensor> split_features(
    const Tensor& both,
    const Tensor& key,
    const Tensor& value) {
  return both.split_with_sizes({key.size(-1), value.size(-1)}, -1);
}

void attend_part(
    const OverlappedPiece& piece,
    const NeighborhoodPart& part,
    const Tensor& slab) {
  const auto others = split_features(slab, piece.key, piece.value);
  attend_neighborhood_into(
      piece.attended_by(part),
      piece.queries_of(piece.query, part),
      seen_by(part, piece.key, others[0]),
      seen_by(part, piece.value, others[1]),
      piece.dims_of(part),
      piece.scale);
}

Tensor zeros_of_arithmetic(const Tensor& x) {
  const auto type = at::toOpMathType(x.scalar_type());
  return at::zeros(x.sizes(), x.options().dtype(type));
}

/// Adds to the gradients of own rows and of the slab.
void attend_part_backward(
    const NeighborhoodGradients& to,
    const Tensor& to_slab,
    const Tensor& grad,
    const OverlappedPiece& piece,
    const NeighborhoodPart& part,
    const Tensor& slab) {
  const auto others = split_features(slab, piece.key, piece.value);
  const auto key = seen_by(part, piece.key, others[0]);
  const auto value = seen_by(part, piece.value, others[1]);
  const bool in_place = is_inner(part) && follow_each_other(part.own);
  const NeighborhoodGradients found{
      piece.queries_of(to.query, part),
      in_place ? named_rows(to.key, part.own) : zeros_of_arithmetic(key),
      in_place ? named_rows(to.value, part.own) : zeros_of_arithmetic(value)};
  attend_neighborhood_backward_onto(
      found,
      piece.queries_of(grad, part),
      piece.queries_of(piece.query, part),
      key,
      value,
      piece.attended_by(part),
      piece.dims_of(part),
      piece.scale);
  if (in_place) {
    return;
  }
  const auto count = [](const RowList& rows) {
    return static_cast<int64_t>(rows.size());
  };
  const std::vector<int64_t> sizes{
      count(part.before), count(part.own), count(part.after)};
  const auto of_key = found.key.split_with_sizes(sizes, 1);
  const auto of_value = found.value.split_with_sizes(sizes, 1);
  add_to_rows(to.key, part.own, of_key[1]);
  add_to_rows(to.value, part.own, of_value[1]);
  add_to_rows(to_slab, part.before, at::cat({of_key[0], of_value[0]}, -1));
  add_to_rows(to_slab, part.after, at::cat({of_key[2], of_value[2]}, -1));
}

// ---- all parts --------------------------------------------------------------

template <class Run>
void for_parts(const NeighborhoodOverlap& plan, bool inner, const Run& run) {
  for (const auto& part : plan.parts) {
    if (is_inner(part) == inner) {
      run(part);
    }
  }
}

/// The slab.
Tensor attend_parts(OverlappedPiece& piece) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  const auto& plan = piece.plan;
  const auto sent = at::cat(
      {named_rows(piece.key, plan.sent), named_rows(piece.value, plan.sent)},
      -1);
  const auto none = sent.narrow(1, 0, 0);
  const auto slab = exchange_during(sent, plan.bring, [&] {
    for_parts(plan, /*inner=*/true, [&](const NeighborhoodPart& part) {
      attend_part(piece, part, none);
    });
  });
  for_parts(plan, /*inner=*/false, [&](const NeighborhoodPart& part) {
    attend_part(piece, part, slab);
  });
  return slab;
}

NeighborhoodGradients attend_parts_backward(
    const Tensor& grad,
    const OverlappedPiece& piece,
    const Tensor& slab) {
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  const auto& plan = piece.plan;
  auto result = zero_gradients(piece.query, piece.key, piece.value);
  const auto of_slab = zeros_of_arithmetic(slab);
  const auto run = [&](const NeighborhoodPart& part) {
    attend_part_backward(result, of_slab, grad, piece, part, slab);
  };
  for_parts(plan, /*inner=*/false, run);
  const auto type = slab.scalar_type();
  const auto returned = exchange_during(of_slab.to(type), plan.bring_back, [&] {
    for_parts(plan, /*inner=*/true, run);
  });
  const auto parts = split_features(returned, piece.key, piece.value);
  add_to_rows(result.key, plan.sent, parts[0]);
  add_to_rows(result.value, plan.sent, parts[1]);
  return {result.query.to(type), result.key.to(type), result.value.to(type)};
}

// ---- autograd ---------------------------------------------------------------

/// By differentiable operators on joined rows.
variable_list joined_gradients(
    const Tensor& grad,
    const variable_list& inputs,
    const NeighborhoodOverlap& plan,
    double scale) {
  const auto [key, value] = join_rows(inputs[1], inputs[2], plan.joined);
  const auto [dq, dk, dv] = attend_windows_backward(
      grad, inputs[0], key, value, plan.dims, scale, /*in_parts=*/false);
  std::vector<EncodedExchange> back;
  for (const auto& each : plan.joined) {
    back.push_back(adjoint(each));
  }
  const auto [of_key, of_value] = join_rows(dk, dv, back);
  return {dq, of_key, of_value};
}

struct NeighborhoodOverlapBackward : SavedInputsNode {
  NeighborhoodOverlapBackward(
      const variable_list& saved,
      OverlapPlan plan,
      double scale)
      : SavedInputsNode(saved),
        scope_(current_comm_scope()),
        plan_(std::move(plan)),
        scale_(scale) {}

  std::string name() const override {
    return "ShardTensorNeighborhoodAttentionBackward";
  }
  variable_list gradients(
      const Tensor& grad,
      const variable_list& inputs,
      bool differentiable) override {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::autocast_dispatch_keyset);
    const CommScope scope(backward_of(scope_));
    if (differentiable) {
      return joined_gradients(grad, inputs, *plan_, scale_);
    }
    const OverlappedPiece piece{
        *plan_,
        scale_,
        inputs[0],
        inputs[1],
        inputs[2],
        {inputs[4], inputs[5]}};
    const auto [dq, dk, dv] = attend_parts_backward(grad, piece, inputs[3]);
    return {dq, dk, dv};
  }

  std::string scope_;
  OverlapPlan plan_;
  double scale_;
};

} // namespace

Tensor attend_overlapped(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const OverlapPlan& plan,
    double scale) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  Tensor output;
  Tensor log_sum;
  Tensor slab;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    OverlappedPiece piece{
        *plan,
        scale,
        query,
        key,
        value,
        empty_neighborhood_output(query, value)};
    slab = attend_parts(piece);
    log_sum = piece.attended.log_sum;
    output = piece.attended.output.to(query.scalar_type());
  }
  const variable_list inputs{query, key, value};
  connect<NeighborhoodOverlapBackward>(
      output,
      inputs,
      variable_list{query, key, value, slab, output.detach(), log_sum},
      plan,
      scale);
  return output;
}

} // namespace shardtensor::detail
