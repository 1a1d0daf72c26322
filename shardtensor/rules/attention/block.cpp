#include "shardtensor/rules/attention/block.h"

#include <algorithm>

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "shardtensor/rules/attention/device_kernels.h"
#include "shardtensor/rules/attention/shared_heads.h"
#include "shardtensor/tensor/shard_tensor_impl.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

/// Rows of a mask and hidden rows are those of all queries, of which a causal
/// product has some.
void check_mask(const BlockOptions& options) {
  TORCH_INTERNAL_ASSERT(!options.causal || !options.mask.defined());
}

/// A bool mask as one to add.
Tensor added_mask(const Tensor& mask, at::ScalarType dtype) {
  if (!mask.defined() || mask.scalar_type() != at::kBool) {
    return mask.defined() ? mask.to(dtype) : mask;
  }
  return at::zeros(mask.sizes(), mask.options().dtype(dtype))
      .masked_fill_(mask.logical_not(), kUnseen);
}

/// In fp32 for half precision, where it is: that holds more.
Tensor mask_of_flash(const Tensor& mask, at::ScalarType type) {
  return mask.defined() && mask.scalar_type() == at::toOpMathType(type)
      ? mask
      : added_mask(mask, type);
}

/// -inf where a query sees no key: the scores say exp(-inf - 0) = 0 then.
Tensor finite(const Tensor& log_sum) {
  return log_sum.masked_fill(log_sum.isneginf(), 0);
}

/// For a kernel, that finds no weight in rows which are not its own.
Tensor log_sum_for_kernel(const Tensor& log_sum, const BlockOptions& options) {
  constexpr double kLarge = 1e30;
  const auto& others = options.hidden.queries;
  return others.defined() ? finite(log_sum).index_fill_(2, others, kLarge)
                          : finite(log_sum);
}

// ---- PyTorch's kernel of the CPU --------------------------------------------

bool flash_takes(const Tensor& query, const Keys& keys) {
  const auto& [key, value] = keys;
  return query.is_cpu() && query.size(3) == value.size(3) &&
      query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1;
}

Attended flash(
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [key, value] = keys;
  const auto mask = mask_of_flash(options.mask, query.scalar_type());
  const auto optional = mask.defined() ? std::optional(mask) : std::nullopt;
  auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, 0, options.causal, optional, options.scale);
  log_sum = log_sum.contiguous();
  if (mask.defined()) {
    // It says 0 of a query that sees no key.
    log_sum.masked_fill_(mask.isneginf().all(-1), kUnseen);
  }
  return {output, log_sum};
}

AttentionGradients flash_backward(
    const AttendedQueries& queries,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [query, all, grad] = queries;
  const auto& [key, value] = keys;
  const auto mask = mask_of_flash(options.mask, query.scalar_type());
  const auto optional = mask.defined() ? std::optional(mask) : std::nullopt;
  const auto [dquery, dkey, dvalue] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          grad,
          query,
          key,
          value,
          all.output,
          log_sum_for_kernel(all.log_sum, options),
          0,
          options.causal,
          optional,
          options.scale);
  return {dquery, dkey, dvalue, {}};
}

// ---- from scores ------------------------------------------------------------

constexpr int64_t kScores = int64_t{1} << 22; // at a time

/// The queries of a chunk have at most kScores scores.
int64_t rows_of_chunk(const Tensor& query, const Tensor& key) {
  const int64_t of_row = query.size(0) * query.size(1) * key.size(2);
  return std::max<int64_t>(1, kScores / of_row);
}

Tensor rows_of_mask(const Tensor& mask, int64_t begin, int64_t rows) {
  return mask.size(2) == 1 ? mask : mask.narrow(2, begin, rows);
}

Tensor scores_of(
    const Tensor& query,
    const Tensor& key,
    int64_t first_row,
    const BlockOptions& options) {
  auto scores = at::matmul(query, key.mT()).mul_(options.scale);
  if (options.mask.defined()) {
    scores.add_(added_mask(
        rows_of_mask(options.mask, first_row, query.size(2)),
        scores.scalar_type()));
  }
  if (options.hidden.origin.defined()) {
    scores.sub_(rows_of_mask(options.hidden.origin, first_row, query.size(2)));
  }
  if (options.causal) {
    const auto sees =
        at::ones({query.size(2), key.size(2)}, query.options().dtype(at::kBool))
            .tril(first_row);
    scores.masked_fill_(sees.logical_not(), kUnseen);
  }
  return scores;
}

/// The weights that are left of these, which are those of a chunk.
Tensor kept(
    const Tensor& weights,
    int64_t first_row,
    const BlockOptions& options) {
  if (!options.dropout) {
    return weights;
  }
  const auto& [all, rows, columns] = *options.dropout;
  const Interval own{
      rows.begin + first_row, rows.begin + first_row + weights.size(2)};
  return weights * kept_in_block(weights, all, own, columns);
}

/// visit(first row, rows) of the queries, chunk by chunk.
template <class Visit>
void for_chunks(const Tensor& query, const Tensor& key, const Visit& visit) {
  const int64_t rows = rows_of_chunk(query, key);
  for (int64_t first = 0; first < query.size(2); first += rows) {
    visit(first, std::min(rows, query.size(2) - first));
  }
}

Attended attend_by_scores(
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  const auto type = at::toOpMathType(query.scalar_type());
  const auto k = for_heads(keys.key, query.size(1)).to(type);
  const auto v = for_heads(keys.value, query.size(1)).to(type);
  std::vector<Tensor> outputs;
  std::vector<Tensor> log_sums;
  for_chunks(query, keys.key, [&](int64_t first, int64_t rows) {
    const auto q = query.narrow(2, first, rows).to(type);
    const auto scores = scores_of(q, k, first, options);
    log_sums.push_back(at::logsumexp(scores, {-1}));
    // Not by the log_sum, which large scores round.
    const auto weights =
        at::softmax(scores, -1)
            .masked_fill_(log_sums.back().isneginf().unsqueeze(-1), 0);
    outputs.push_back(
        at::matmul(kept(weights, first, options), v).to(query.scalar_type()));
  });
  return {at::cat(outputs, 2), at::cat(log_sums, 2)};
}

AttentionGradients backward_by_scores(
    const AttendedQueries& queries,
    const Keys& keys,
    bool wants_mask,
    const BlockOptions& options) {
  const auto& query = queries.query;
  const auto type = at::toOpMathType(query.scalar_type());
  const auto k = for_heads(keys.key, query.size(1)).to(type);
  const auto v = for_heads(keys.value, query.size(1)).to(type);
  const auto log_sum = finite(queries.all.log_sum).unsqueeze(-1);
  auto dkey = at::zeros_like(k);
  auto dvalue = at::zeros_like(v);
  std::vector<Tensor> dqueries;
  std::vector<Tensor> dmasks;
  for_chunks(query, keys.key, [&](int64_t first, int64_t rows) {
    const auto part = [&](const Tensor& x) {
      return x.narrow(2, first, rows).to(type);
    };
    const auto q = part(query);
    const auto g = part(queries.grad);
    // Rounding, coarse next to large numbers, may differ from forward's.
    const auto weights =
        (scores_of(q, k, first, options) - part(log_sum)).clamp_max_(0).exp_();
    const auto mean = (g * part(queries.all.output)).sum(-1, /*keepdim=*/true);
    const auto dweights = kept(at::matmul(g, v.mT()), first, options);
    const auto dscores = weights * (dweights - mean);
    dvalue += at::matmul(kept(weights, first, options).mT(), g);
    dkey += at::matmul(dscores.mT(), q).mul_(options.scale);
    dqueries.push_back(at::matmul(dscores, k).mul_(options.scale));
    if (wants_mask) {
      dmasks.push_back(dscores);
    }
  });
  const auto dtype = query.scalar_type();
  return {
      at::cat(dqueries, 2).to(dtype),
      of_shared_heads(dkey, keys.key.size(1)).to(dtype),
      of_shared_heads(dvalue, keys.value.size(1)).to(dtype),
      wants_mask ? at::cat(dmasks, 2) : Tensor()};
}

/// The options as kernels of devices take them.
BlockOptions with_added_mask(const BlockOptions& options, const Tensor& query) {
  BlockOptions added{
      options.causal,
      options.scale,
      added_mask(options.mask, query.scalar_type())};
  added.all_keys = options.all_keys;
  return added;
}

// ---- rows that hide all keys ------------------------------------------------

/// The options of these queries.
BlockOptions options_of_rows(const BlockOptions& options, const Tensor& rows) {
  const auto part = [&](const Tensor& x) {
    return x.size(2) == 1 ? x : x.index_select(2, rows);
  };
  return {
      options.causal,
      options.scale,
      part(options.mask),
      std::nullopt,
      {part(options.hidden.origin), {}}};
}

/// These queries, of all of a block, without what is hidden from them.
BlockOptions seen_by_rows(
    const BlockOptions& options,
    const Tensor& rows,
    int64_t keys) {
  auto mask = options.mask;
  if (options.causal) {
    mask = at::arange(keys, rows.options())
               .le(rows.unsqueeze(1))
               .view({1, 1, rows.size(0), keys});
  } else if (mask.defined() && mask.size(2) != 1) {
    mask = mask.index_select(2, rows);
  }
  return {/*causal=*/false, options.scale, mask};
}

/// PyTorch's kernel of the CPU says 0 of a row whose scores are all -inf,
/// whatever made them so, and of some that overflow to inf. Beside other blocks
/// of keys the one were a weight, the other a number in the place of NaN.
Attended with_rows_of_zero(
    Attended result,
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  if (options.all_keys || has_no_values(result.log_sum) ||
      !result.log_sum.eq(0).any().item<bool>()) {
    return result;
  }
  const auto rows =
      result.log_sum.eq(0).flatten(0, 1).any(0).nonzero().squeeze(1);
  const auto part = attend_by_scores(
      query.index_select(2, rows),
      keys,
      seen_by_rows(options, rows, keys.key.size(2)));
  result.output.index_copy_(2, rows, part.output);
  result.log_sum.index_copy_(2, rows, part.log_sum);
  return result;
}

/// What a kernel gave, but for the rows that it cannot do.
Attended with_hidden_rows(
    Attended result,
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& rows = options.hidden.queries;
  if (rows.defined()) {
    const auto part = attend_by_scores(
        query.index_select(2, rows), keys, options_of_rows(options, rows));
    result.output.index_copy_(2, rows, part.output);
    result.log_sum.index_copy_(2, rows, part.log_sum);
  }
  return result;
}

AttentionGradients with_hidden_rows(
    AttentionGradients result,
    const AttendedQueries& queries,
    const Keys& keys,
    const BlockOptions& options) {
  const auto& [query, all, grad] = queries;
  const auto& rows = options.hidden.queries;
  if (rows.defined()) {
    const auto of_rows = [&rows](const Tensor& x) {
      return x.index_select(2, rows);
    };
    const auto part = backward_by_scores(
        {of_rows(query),
         {of_rows(all.output), of_rows(all.log_sum)},
         of_rows(grad)},
        keys,
        /*wants_mask=*/false,
        options_of_rows(options, rows));
    result.query.index_add_(2, rows, part.query);
    result.key.add_(part.key);
    result.value.add_(part.value);
  }
  return result;
}

} // namespace

Attended attend(
    const Tensor& query,
    const Keys& keys,
    const BlockOptions& options) {
  check_mask(options);
  const auto with_hidden = [&](Attended by_kernel) {
    return with_hidden_rows(std::move(by_kernel), query, keys, options);
  };
  if (options.dropout) {
    return attend_by_scores(query, keys, options);
  }
  if (flash_takes(query, keys)) {
    return with_hidden(
        with_rows_of_zero(flash(query, keys, options), query, keys, options));
  }
  const auto added = with_added_mask(options, query);
  const auto kernel = choose_kernel(query, keys, added, /*for_backward=*/false);
  return kernel == at::SDPBackend::math
      ? attend_by_scores(query, keys, options)
      : with_hidden(attend_with(kernel, query, keys, added));
}

AttentionGradients attend_backward(
    const AttendedQueries& queries,
    const Keys& keys,
    bool wants_mask,
    const BlockOptions& options) {
  check_mask(options);
  const auto with_hidden = [&](AttentionGradients by_kernel) {
    return with_hidden_rows(std::move(by_kernel), queries, keys, options);
  };
  if (wants_mask || options.dropout) {
    return backward_by_scores(queries, keys, wants_mask, options);
  }
  if (flash_takes(queries.query, keys)) {
    return with_hidden(flash_backward(queries, keys, options));
  }
  const auto added = with_added_mask(options, queries.query);
  const auto kernel =
      choose_kernel(queries.query, keys, added, /*for_backward=*/true);
  if (kernel == at::SDPBackend::math) {
    return backward_by_scores(queries, keys, wants_mask, options);
  }
  auto for_kernel = queries;
  for_kernel.all.log_sum = log_sum_for_kernel(queries.all.log_sum, options);
  return with_hidden(attend_backward_with(kernel, for_kernel, keys, added));
}

} // namespace shardtensor::detail
