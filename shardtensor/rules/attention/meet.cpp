#include "shardtensor/rules/attention/meet.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "shardtensor/rules/attention/block.h"

namespace shardtensor::detail {
namespace {

using at::Tensor;

Tensor mask_of(const Tensor& mask, const Product& product) {
  return mask_part(
      mask_part(mask, kRows, product.queries), kRows + 1, product.columns);
}

BlockOptions options_of(
    const Product& product,
    const Mask& mask,
    const AttentionWork& work) {
  BlockOptions options{
      product.causal, work.scale, mask_of(mask.added, product)};
  options.hidden = mask.hidden; // a product with a mask has all queries
  if (work.dropout) {
    options.dropout = {work.dropout, product.rows, product.columns};
  }
  return options;
}

/// Of those that a rank's queries see.
bool has_all_keys(Meeting meeting) {
  return meeting == Meeting::Here || meeting == Meeting::AllGather;
}

Tensor zeros_for_sum(const Tensor& like) {
  return at::zeros_like(
      like, like.options().dtype(at::toOpMathType(like.scalar_type())));
}

/// Adds to rows of a sum for all rows of `like`, which a first term that has
/// them all becomes: two passes less.
void add_rows(
    Tensor& sum,
    const Tensor& like,
    const Interval& rows,
    const Tensor& term) {
  if (!sum.defined() && rows.extent() == like.size(kRows)) {
    sum = term.to(at::toOpMathType(like.scalar_type()));
    return;
  }
  if (!sum.defined()) {
    sum = zeros_for_sum(like);
  }
  rows_of(sum, rows).add_(term);
}

AttendedQueries part_of(
    const AttendedQueries& queries,
    const Interval& rows,
    int64_t dim) {
  const auto& [query, all, grad] = queries;
  return {
      rows_of(query, rows, dim),
      {rows_of(all.output, rows, dim), rows_of(all.log_sum, rows, dim)},
      rows_of(grad, rows, dim)};
}

} // namespace

Tensor rows_of(const Tensor& x, const Interval& rows, int64_t dim) {
  return x.narrow(dim, rows.begin, rows.extent());
}

Keys rows_of(const Keys& keys, const Interval& rows, int64_t dim) {
  return {rows_of(keys.key, rows, dim), rows_of(keys.value, rows, dim)};
}

void Attention::meet(const Keys& keys, const Rows& rows) {
  if (query_.numel() == 0 || keys.key.numel() == 0) {
    return;
  }
  const auto products =
      plan_products(work_.queries[work_.rank], rows, work_.causal);
  for (const auto& product : products) {
    auto options = options_of(product, mask_, work_);
    options.all_keys = products.size() == 1 && has_all_keys(work_.meeting);
    add(product,
        attend(
            rows_of(query_, product.queries),
            rows_of(keys, product.keys),
            options));
  }
}

Attended Attention::result(int64_t features) {
  if (!all_.output.defined()) {
    start(features);
  }
  return all_;
}

void Attention::add(const Product& product, const Attended& part) {
  if (!all_.output.defined() && part.output.size(kRows) == query_.size(kRows)) {
    all_ = part;
    return;
  }
  if (!all_.output.defined()) {
    start(part.output.size(3));
  }
  all_.output = all_.output.to(at::toOpMathType(query_.scalar_type()));
  merge(
      {rows_of(all_.output, product.queries),
       rows_of(all_.log_sum, product.queries)},
      part);
}

void Attention::start(int64_t features) {
  const auto options =
      query_.options().dtype(at::toOpMathType(query_.scalar_type()));
  auto sizes = query_.sizes().vec();
  sizes.back() = features;
  all_.output = features == query_.size(3) ? at::zeros_like(query_, options)
                                           : at::zeros(sizes, options);
  sizes.pop_back();
  all_.log_sum = at::full(sizes, kUnseen, options);
}

void Queries::start_grad() {
  if (!query_grad.defined()) {
    query_grad = zeros_for_sum(query);
  }
}

Queries Queries::part(int64_t dim, const Interval& keys, int64_t of) const {
  const int64_t each = of ? query.size(dim) / of : 0;
  const Interval own{keys.begin * each, keys.end * each};
  return {
      part_of(*this, own, dim),
      mask.part(dim, own),
      rows_of(query_grad, own, dim),
      mask_part(mask_grad, dim, own)};
}

Keys meet_backward(
    Queries& queries,
    const Keys& keys,
    const Rows& rows,
    const AttentionWork& work) {
  std::vector<Product> products;
  if (queries.query.numel() > 0 && keys.key.numel() > 0) {
    products = plan_products(work.queries[work.rank], rows, work.causal);
  }
  Keys grads;
  for (const auto& product : products) {
    const auto& q = product.queries;
    const auto part = attend_backward(
        part_of(queries, q, kRows),
        rows_of(keys, product.keys),
        queries.mask_grad.defined(),
        options_of(product, queries.mask, work));
    add_rows(queries.query_grad, queries.query, q, part.query);
    add_rows(grads.key, keys.key, product.keys, part.key);
    add_rows(grads.value, keys.value, product.keys, part.value);
    if (part.mask.defined()) {
      const auto target = mask_of(queries.mask_grad, product);
      target.add_(part.mask.sum_to_size(target.sizes()));
    }
  }
  if (!grads.key.defined()) {
    grads = {zeros_for_sum(keys.key), zeros_for_sum(keys.value)};
  }
  return grads;
}

} // namespace shardtensor::detail
