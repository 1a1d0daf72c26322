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

} // namespace

Tensor rows_of(const Tensor& x, const Interval& rows, int64_t dim) {
  return x.narrow(dim, rows.begin, rows.extent());
}

void Attention::meet(const Keys& keys, const Rows& rows) {
  if (query_.numel() == 0 || keys.key.numel() == 0) {
    return;
  }
  for (const auto& product :
       plan_products(work_.queries[work_.rank], rows, work_.causal)) {
    add(product,
        attend(
            rows_of(query_, product.queries),
            rows_of(keys.key, product.keys),
            rows_of(keys.value, product.keys),
            options_of(product, mask_, work_)));
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

Queries Queries::part(int64_t dim, const Interval& keys, int64_t of) const {
  const int64_t each = of ? query.size(dim) / of : 0;
  const Interval own{keys.begin * each, keys.end * each};
  return {
      rows_of(query, own, dim),
      rows_of(grad, own, dim),
      {rows_of(all.output, own, dim), rows_of(all.log_sum, own, dim)},
      mask.part(dim, own),
      rows_of(query_grad, own, dim),
      mask_part(mask_grad, dim, own)};
}

Keys meet_backward(
    const Queries& queries,
    const Keys& keys,
    const Rows& rows,
    const AttentionWork& work) {
  const auto options =
      keys.key.options().dtype(at::toOpMathType(keys.key.scalar_type()));
  Keys grads{
      at::zeros_like(keys.key, options), at::zeros_like(keys.value, options)};
  if (queries.query.numel() == 0 || keys.key.numel() == 0) {
    return grads;
  }
  for (const auto& product :
       plan_products(work.queries[work.rank], rows, work.causal)) {
    const auto& q = product.queries;
    const auto part = attend_backward(
        rows_of(queries.grad, q),
        rows_of(queries.query, q),
        rows_of(keys.key, product.keys),
        rows_of(keys.value, product.keys),
        {rows_of(queries.all.output, q), rows_of(queries.all.log_sum, q)},
        queries.mask_grad.defined(),
        options_of(product, queries.mask, work));
    rows_of(queries.query_grad, q).add_(part.query);
    rows_of(grads.key, product.keys).add_(part.key);
    rows_of(grads.value, product.keys).add_(part.value);
    if (part.mask.defined()) {
      const auto target = mask_of(queries.mask_grad, product);
      target.add_(part.mask.sum_to_size(target.sizes()));
    }
  }
  return grads;
}

} // namespace shardtensor::detail
