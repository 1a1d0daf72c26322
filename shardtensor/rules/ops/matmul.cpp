#include <ATen/ExpandUtils.h>

#include "shardtensor/dispatch/labels.h"

namespace shardtensor::detail {
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

template <const Product& product>
Decision product_rule(Call& call) {
  return rule_by_labels(
      call,
      {{product.left, product.right, product.output}, {product.output}},
      Linearity::Product);
}

/// addend + left @ right. Where the product is a Partial sum, the addend counts
/// on one rank only.
template <const Product& product>
Decision add_product_rule(Call& call) {
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

const RegisterRules products{
    {"aten::mm", product_rule<kMm>},
    {"aten::bmm", product_rule<kBmm>},
    {"aten::mv", product_rule<kMv>},
    {"aten::dot", product_rule<kDot>},
    {"aten::vdot", product_rule<kDot>},
    {"aten::addmm", add_product_rule<kMm>},
    {"aten::baddbmm", add_product_rule<kBmm>},
    {"aten::addmv", add_product_rule<kMv>},
    {"aten::addr", add_product_rule<kOuter>},
};

} // namespace

} // namespace shardtensor::detail
