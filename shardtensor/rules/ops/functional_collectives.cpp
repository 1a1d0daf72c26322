#include <ATen/WrapDimUtils.h>
#include <c10/util/Exception.h>

#include "shardtensor/comm/group.h"
#include "shardtensor/dispatch/rule.h"

// PyTorch's own collectives with a ShardTensor for their local tensor, as a
// DTensor of ShardTensors has: along an axis that the tensor's mesh has not.
// Its ranks hold the same piece of the domain, so each piece is reduced,
// gathered and scattered by itself. Where the dim that these join and split (0,
// mostly) is cut, each rank's rows are cut alike, a repeated partition.

namespace shardtensor::detail {
namespace {

/// A group of ranks that hold other pieces would mix them.
void check_same_piece(const Call& call, const ShardSpec& spec) {
  const auto& group = call.argument("group_name");
  const auto& own = spec.mesh()->options();
  const auto refuse_if = [&](bool mixes) {
    TORCH_CHECK_VALUE(
        !mixes,
        call.name(),
        ": expected a group of ranks that hold the same piece, got one along "
        "which ",
        spec,
        " is cut; redistribute() and full_tensor() bring its pieces together");
  };
  if (!group.isString() || !spec.is_sharded()) {
    return;
  }
  refuse_if(own.ranks.size() > 1 && group.toStringRef() == own.group);
  for (const int64_t axis : spec.sharded_axes()) {
    refuse_if(
        own.shape[axis] > 1 && !own.axis_groups.empty() &&
        group.toStringRef() == own.axis_groups[axis]);
  }
}

/// The operand's layout, as a term of all ranks of the group.
SpecPtr own_layout(const Call& call) {
  const auto layout = without_partial(call.operand(0).spec);
  check_same_piece(call, *layout);
  return layout;
}

SpecPtr rows_layout(const Call& call) {
  const auto layout = own_layout(call);
  TORCH_CHECK_VALUE(
      layout->dim() > 0,
      call.name(),
      ": expected a tensor with dims, got none");
  return layout;
}

Decision decided(const SpecPtr& input, const SpecPtr& output) {
  Decision decision;
  decision.inputs = {input};
  decision.outputs = {output};
  return decision;
}

Decision wait_rule(Call& call) {
  const auto layout = without_partial(call.operand(0).spec);
  return decided(layout, layout);
}

Decision each_piece_rule(Call& call) {
  const auto layout = own_layout(call);
  return decided(layout, layout);
}

/// One of `chunks` equal parts of a dim: cut as they all are where that is
/// alike, else by chunk.
SpecPtr chunk_of(const SpecPtr& spec, int64_t chunks, int64_t dim = 0) {
  if (spec->is_sharded(dim) && spec->partition(dim).repeat() % chunks == 0) {
    const auto& rows = spec->partition(dim);
    return with_partition(
        spec, dim, Partition(rows.sizes(), rows.repeat() / chunks));
  }
  auto sizes = spec->sizes();
  sizes[dim] /= chunks;
  return with_sizes(spec, sizes);
}

/// `chunks` such parts, one behind the other.
SpecPtr chunks_of(const SpecPtr& spec, int64_t chunks, int64_t dim = 0) {
  if (spec->is_sharded(dim)) {
    return with_partition(spec, dim, spec->partition(dim).repeated(chunks));
  }
  auto sizes = spec->sizes();
  sizes[dim] *= chunks;
  return with_sizes(spec, sizes);
}

void check_divisible(const Call& call, int64_t extent, int64_t dim, int64_t n) {
  TORCH_CHECK_VALUE(
      extent % n == 0,
      call.name(),
      ": expected a dim ",
      dim,
      " that ",
      n,
      " divides, got ",
      extent);
}

Decision gather_rule(Call& call) {
  const auto own = rows_layout(call);
  const int64_t ranks = call.argument("group_size").toInt();
  return decided(own, chunks_of(own, ranks));
}

Decision scatter_rule(Call& call) {
  const auto own = rows_layout(call);
  const int64_t ranks = call.argument("group_size").toInt();
  check_divisible(call, own->size(0), 0, ranks);
  const auto chunk = chunk_of(own, ranks);
  return decided(chunks_of(chunk, ranks), chunk);
}

/// Chunks of one dim travel, and are joined along another.
Decision change_dim_rule(Call& call) {
  const auto own = rows_layout(call);
  const int64_t ranks =
      Group(call.argument("group_name").toStringRef()).ranks();
  const auto dim_of = [&](const char* name) {
    return at::maybe_wrap_dim(call.argument(name).toInt(), own->dim());
  };
  const auto from = dim_of("shard_dim");
  check_divisible(call, own->size(from), from, ranks);
  const auto chunk = chunk_of(own, ranks, from);
  return decided(
      chunks_of(chunk, ranks, from),
      chunks_of(chunk, ranks, dim_of("gather_dim")));
}

const RegisterRules collectives{
    {"_c10d_functional::all_reduce", each_piece_rule},
    {"_c10d_functional::broadcast", each_piece_rule},
    {"_c10d_functional::all_gather_into_tensor", gather_rule},
    {"_c10d_functional::reduce_scatter_tensor", scatter_rule},
    {"_c10d_functional::wait_tensor", wait_rule},
    {"_dtensor::shard_dim_alltoall", change_dim_rule},
};

} // namespace
} // namespace shardtensor::detail
