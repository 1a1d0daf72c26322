#include <ATen/ExpandUtils.h>

#include "shardtensor/dispatch/labels.h"

namespace shardtensor {
namespace {

constexpr int64_t kBatch = 3;

/// The labels of a product of two operands, "mk,kn->mn" and its relatives.
struct Product {
  std::vector<int64_t> left;
  std::vector<int64_t> right;
  std::vector<int64_t> output;
};

const Product kMm = {{0, 1}, {1, 2}, {0, 2}};
const Product kBmm = {{kBatch, 0, 1}, {kBatch, 1, 2}, {kBatch, 0, 2}};
const Product kMv = {{0, 1}, {1}, {0}};
const Product kDot = {{1}, {1}, {}};
const Product kOuter = {{0}, {2}, {0, 2}};

Decision product_rule(Call& call, const Product& product) {
  return rule_by_labels(
      call,
      {{product.left, product.right, product.output}, {product.output}},
      Linearity::Product);
}

/// addend + left @ right. Where the product is a Partial sum, the addend counts
/// on one rank only.
Decision add_product_rule(Call& call, const Product& product) {
  const auto& addend = call.operand(0);
  Labels labels{
      {std::vector<int64_t>(addend.dim(), kPrivate),
       product.left,
       product.right,
       product.output},
      {product.output}};
  auto sizes = sizes_by_labels(call, labels);
  if (sizes && at::is_expandable_to(addend.tensor.sizes(), sizes->at(0))) {
    call.set_output_sizes(*std::move(sizes));
  }
  labels.operands[0] =
      broadcast_to(addend, call.output_sizes()[0], product.output);
  return rule_by_labels(call, labels, Linearity::None, 0);
}

Decision mm_rule(Call& call) {
  return product_rule(call, kMm);
}
Decision bmm_rule(Call& call) {
  return product_rule(call, kBmm);
}
Decision mv_rule(Call& call) {
  return product_rule(call, kMv);
}
Decision dot_rule(Call& call) {
  return product_rule(call, kDot);
}
Decision addmm_rule(Call& call) {
  return add_product_rule(call, kMm);
}
Decision baddbmm_rule(Call& call) {
  return add_product_rule(call, kBmm);
}
Decision addmv_rule(Call& call) {
  return add_product_rule(call, kMv);
}
Decision addr_rule(Call& call) {
  return add_product_rule(call, kOuter);
}

const RegisterRules products{
    {"aten::mm", mm_rule},
    {"aten::bmm", bmm_rule},
    {"aten::mv", mv_rule},
    {"aten::dot", dot_rule},
    {"aten::vdot", dot_rule},
    {"aten::addmm", addmm_rule},
    {"aten::baddbmm", baddbmm_rule},
    {"aten::addmv", addmv_rule},
    {"aten::addr", addr_rule},
};

} // namespace

} // namespace shardtensor
