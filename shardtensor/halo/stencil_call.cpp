#include "shardtensor/halo/stencil_call.h"

#include <algorithm>

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/record_function.h>

#include "shardtensor/layout/plans/transfer.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/tensor/shard_tensor.h"

namespace shardtensor::detail {

namespace {

bool contains(const std::vector<int64_t>& dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

} // namespace

SpecPtr stencil_layout(
    const SpecPtr& spec,
    const std::vector<int64_t>& whole,
    const std::vector<int64_t>& rowwise) {
  SpecPtr layout = without_partial(spec);
  for (const int64_t dim : whole) {
    if (layout->is_sharded(dim)) {
      layout = without_shard(layout, dim);
    }
  }
  for (const int64_t dim : layout->sharded_dims()) {
    const Partition& partition = layout->partition(dim);
    const bool fits = partition.is_contiguous() ||
        (contains(rowwise, dim) && !partition.has_empty_piece());
    if (!fits) {
      layout = contiguous_dim(layout, dim);
    }
  }
  return layout;
}

namespace {

EncodedExchange encode_gather(
    const SpecPtr& spec,
    int64_t first_dim,
    const std::vector<std::vector<StencilPiece>>& pieces) {
  std::vector<int64_t> dims;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (!pieces[i].empty()) {
      dims.push_back(first_dim + static_cast<int64_t>(i));
    }
  }
  const auto rows = [&](int64_t dim, int64_t position) {
    const auto& piece = pieces[dim - first_dim][spec->piece(dim, position)];
    return boundary_rows(piece.rows, spec->size(dim));
  };
  const Mesh& mesh = *spec->mesh();
  return encode(plan_gather_rows(spec, dims, rows, mesh.position()), mesh);
}

std::vector<int64_t> rowwise_dims(
    const std::vector<Stencil>& stencils,
    int64_t first_dim) {
  std::vector<int64_t> dims;
  for (size_t i = 0; i < stencils.size(); ++i) {
    if (stencils[i].is_rowwise()) {
      dims.push_back(first_dim + static_cast<int64_t>(i));
    }
  }
  return dims;
}

} // namespace

StencilCall plan_stencil_call(
    const SpecPtr& spec,
    const std::vector<int64_t>& whole,
    const std::vector<Stencil>& stencils,
    const std::vector<int64_t>& padding,
    std::vector<int64_t> output_sizes,
    const std::vector<bool>& gather_always) {
  const int64_t first = spec->dim() - static_cast<int64_t>(stencils.size());
  const SpecPtr input =
      stencil_layout(spec, whole, rowwise_dims(stencils, first));
  const int64_t position = std::max<int64_t>(0, input->mesh()->position());
  StencilCall call{input, nullptr, false, {}, {}, {}};
  auto partitions = input->partitions();
  std::vector<std::vector<StencilPiece>> gathered(stencils.size());
  for (size_t i = 0; i < stencils.size(); ++i) {
    const int64_t dim = first + static_cast<int64_t>(i);
    const bool sharded = input->is_sharded(dim);
    const bool always = !gather_always.empty() && gather_always[i];
    const bool cut = always || (sharded && input->partition(dim).pieces() > 1);
    const auto plan = plan_stencil(
        stencils[i],
        sharded ? input->partition(dim) : Partition({input->size(dim)}));
    if (sharded) {
      partitions[dim] = plan.outputs;
    }
    call.is_cut.push_back(cut);
    if (!cut) {
      const Interval all{0, input->size(dim)};
      call.pieces.push_back({all, padding[i], 0, output_sizes[dim]});
      continue;
    }
    call.pieces.push_back(plan.pieces[input->piece(dim, position)]);
    if (!plan.is_local) {
      gathered[i] = plan.pieces;
      call.gathers = true;
    }
  }
  call.output = make_spec(
      input->mesh(), std::move(output_sizes), input->placements(), partitions);
  if (call.gathers && input->mesh()->contains_this_rank()) {
    call.gather = encode_gather(input, first, gathered);
  }
  return call;
}

namespace {

int64_t find_gathering(
    const StencilCall& call,
    const std::vector<Stencil>& stencils) {
  int64_t found = -1;
  for (size_t i = 0; i < stencils.size(); ++i) {
    if (!call.is_cut[i]) {
      continue;
    }
    const int64_t dim = call.first_dim() + static_cast<int64_t>(i);
    if (!call.input->is_sharded(dim)) {
      return -1;
    }
    if (!plan_stencil(stencils[i], call.input->partition(dim)).is_local) {
      if (found >= 0) {
        return -1;
      }
      found = static_cast<int64_t>(i);
    }
  }
  return found;
}

} // namespace

int64_t find_overlap_stencil(
    const StencilCall& call,
    const std::vector<Stencil>& stencils) {
  return call.gathers && call.input->mesh()->contains_this_rank() &&
          !call.input->has_empty_piece() && !call.output->has_empty_piece()
      ? find_gathering(call, stencils)
      : -1;
}

namespace {

/// See Note [Same work on every rank].
at::Tensor with_something(const at::Tensor& local, const StencilCall& call) {
  std::vector<int64_t> pad(2 * local.dim(), 0); // from the last dim backwards
  bool empty = false;
  for (int64_t dim = 0; dim < call.first_dim(); ++dim) {
    if (local.size(dim) == 0 && call.input->size(dim) > 0) {
      pad[2 * (local.dim() - 1 - dim)] = 1;
      empty = true;
    }
  }
  return empty ? at::constant_pad_nd(local, pad) : local;
}

} // namespace

at::Tensor gather_rows(
    const at::Tensor& local,
    const StencilCall& call,
    at::MemoryFormat format) {
  if (!call.gathers) {
    return with_something(local, call);
  }
  RECORD_FUNCTION("shardtensor::halo_exchange", std::vector<c10::IValue>());
  return with_something(exchange(local, call.gather, format), call);
}

at::Tensor keep_owned(const at::Tensor& local, const StencilCall& call) {
  at::Tensor kept = local;
  const auto& sizes = call.output->local_sizes();
  for (int64_t dim = 0; dim < call.first_dim(); ++dim) {
    if (sizes[dim] == 0 && kept.size(dim) != 0) {
      kept = kept.narrow(dim, 0, 0);
    }
  }
  for (size_t i = 0; i < call.pieces.size(); ++i) {
    const auto dim = call.first_dim() + static_cast<int64_t>(i);
    const auto& piece = call.pieces[i];
    if (piece.crop != 0 || piece.outputs != kept.size(dim)) {
      kept = kept.narrow(dim, piece.crop, piece.outputs);
    }
  }
  return kept;
}

std::vector<int64_t> expanded(at::IntArrayRef values, size_t n) {
  return values.size() == 1 ? std::vector<int64_t>(n, values[0]) : values.vec();
}

} // namespace shardtensor::detail
