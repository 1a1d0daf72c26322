#include <algorithm>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include "shardtensor/dispatch/arguments/refused_dtype.h"
#include "shardtensor/dispatch/function_rule.h"
#include "shardtensor/dispatch/labels.h"
#include "shardtensor/dispatch/nominal_strides.h"
#include "shardtensor/rules/matrix/whole_factor.h"

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

/// PyTorch's meta kernel speaks of dtypes first, its others of sizes.
void check_batches(Call& call) {
  const auto left = call.operand(0).tensor.sizes();
  const auto right = call.operand(1).tensor.sizes();
  TORCH_CHECK(
      left.size() != 3 || right.size() != 3 ||
          (left[0] == right[0] && left[2] == right[1]),
      "Expected size for first two dimensions of batch2 tensor to be: [",
      left[0],
      ", ",
      left[2],
      "] but got: [",
      right[0],
      ", ",
      right[1],
      "].");
}

/// A piece without elements would take others.
void check_types(const Call& call, size_t first, size_t count = 2) {
  const auto expected = call.operand(first).tensor.scalar_type();
  for (size_t i = first + 1; i < first + count; ++i) {
    const auto type = call.operand(i).tensor.scalar_type();
    TORCH_CHECK(
        type == expected,
        call.name(),
        ": expected tensors of the same dtype, got ",
        expected,
        " and ",
        type);
  }
}

template <const Product& product>
Decision product_rule(Call& call) {
  if constexpr (&product == &kBmm) {
    check_batches(call);
  }
  check_types(call, 0);
  check_takes_dtypes(call);
  return rule_by_labels(
      call,
      {{product.left, product.right, product.output}, {product.output}},
      Linearity::Product);
}

/// Raises as PyTorch does, of the global sizes.
void check_expands(at::IntArrayRef given, at::IntArrayRef sizes) {
  if (!at::is_expandable_to(given, sizes)) {
    at::empty(given, at::TensorOptions(at::kMeta)).expand(sizes);
  }
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
  if constexpr (&product == &kMm || &product == &kBmm) {
    check_types(call, 0, 3);
  } else if constexpr (&product == &kMv) {
    check_types(call, 1); // any addend
  }
  check_takes_dtypes(call);
  if (auto sizes = sizes_by_labels(call, labels)) {
    check_expands(addend.tensor.sizes(), sizes->at(0));
    call.set_output_sizes(*std::move(sizes));
  }
  labels.operands[0] =
      broadcast_to(addend, call.output_sizes()[0], product.output);
  auto decision = rule_by_labels(call, labels, Linearity::None, 0);
  const auto dtype = addend.tensor.scalar_type();
  const bool takes_fractions = &product == &kMm || &product == &kBmm;
  if (takes_fractions && at::isIntegralType(dtype, /*includeBool=*/true)) {
    // Kernels of a piece without products refuse them.
    for (const char* factor : {"beta", "alpha"}) {
      decision.arguments.emplace_back(
          call.argument_index(factor),
          factor_of(call.argument(factor).toScalar(), dtype));
    }
  }
  return decision;
}

constexpr auto& addr_rule =
    rule_with_strides<add_product_rule<kOuter>, strides_of_first>;

/// Of three tensors, which get dims of size 1 (`expand`) to be multiplied, then
/// summed over `sumdim`.
Decision trilinear_rule(Call& call) {
  Labels labels;
  std::vector<int64_t> sizes;
  const auto added = [&](size_t operand) {
    return call.argument(operand + 3).toIntVector(); // expand1 and on
  };
  const auto has = [](const std::vector<int64_t>& dims, size_t dim) {
    return std::find(dims.begin(), dims.end(), dim) != dims.end();
  };
  sizes.assign(call.operand(0).dim() + added(0).size(), 1);
  const auto visit = [&](const auto& see) {
    for (size_t i = 0; i < 3; ++i) {
      int64_t own = 0;
      for (size_t dim = 0; dim < sizes.size(); ++dim) {
        if (!has(added(i), dim) && own < call.operand(i).dim()) {
          see(i, dim, call.operand(i).tensor.size(own++));
        }
      }
    }
  };
  visit([&](size_t, size_t dim, int64_t size) {
    sizes[dim] = size == 1 ? sizes[dim] : size;
  });
  labels.operands.resize(3);
  visit([&](size_t operand, size_t dim, int64_t size) {
    labels.operands[operand].push_back(
        size == sizes[dim] ? static_cast<int64_t>(dim) : kPrivate);
  });
  auto& output = labels.outputs.emplace_back();
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (!has(call.argument("sumdim").toIntVector(), dim)) {
      output.push_back(static_cast<int64_t>(dim));
    }
  }
  check_takes_dtypes(call);
  return rule_by_labels(call, labels, Linearity::Product);
}

const RegisterRules products{
    {"aten::_trilinear", trilinear_rule},
    {"aten::mm", product_rule<kMm>},
    {"aten::bmm", product_rule<kBmm>},
    {"aten::mv", product_rule<kMv>},
    {"aten::dot", product_rule<kDot>},
    {"aten::vdot", product_rule<kDot>},
    {"aten::addmm", add_product_rule<kMm>},
    {"aten::baddbmm", add_product_rule<kBmm>},
    {"aten::addr", addr_rule},
};

/// Where a rank's matrix is empty, PyTorch gives the addend as it came.
at::Tensor addmv_kernel(
    const at::Tensor& self,
    const at::Tensor& mat,
    const at::Tensor& vec,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::addmv", "");
  const bool broadcast = mat.dim() == 2 && self.numel() == 1;
  torch::jit::Stack stack{
      broadcast ? self.expand({mat.size(0)}) : self, mat, vec, beta, alpha};
  run_rule(op, add_product_rule<kMv>, &stack);
  return stack.back().toTensor();
}

at::Tensor addbmm_kernel(
    const at::Tensor& self,
    const at::Tensor& batch1,
    const at::Tensor& batch2,
    const at::Scalar& given_beta,
    const at::Scalar& given_alpha) {
  TORCH_CHECK(
      self.scalar_type() == batch2.scalar_type(),
      "addbmm: expected tensors of the same dtype, got ",
      self.scalar_type(),
      " and ",
      batch2.scalar_type());
  const auto beta = factor_of(given_beta, self.scalar_type());
  const auto alpha = factor_of(given_alpha, self.scalar_type());
  const auto products = at::bmm(batch1, batch2);
  const auto sum = at::sum(
      products, at::IntArrayRef{0}, /*keepdim=*/false, products.scalar_type());
  const auto addend = self.expand(sum.sizes()).contiguous(); // as PyTorch's
  return beta.equal(0) ? at::mul(sum, alpha)
                       : at::add(at::mul(addend, beta), sum, alpha);
}

/// PyTorch's own writes into a reshaped `out` and asks by storage whether that
/// was a view; ours have storages of their own.
at::Tensor& matmul_out_function(
    const at::Tensor& self,
    const at::Tensor& other,
    at::Tensor& out) {
  TORCH_CHECK(
      !at::GradMode::is_enabled() ||
          !(self.requires_grad() || other.requires_grad() ||
            out.requires_grad()),
      "matmul(): functions with out=... arguments don't support automatic "
      "differentiation, but one of the arguments requires grad.");
  const auto result = at::matmul(self, other);
  if (out.sizes() != result.sizes()) {
    out.resize_(result.sizes());
  }
  return out.copy_(result);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_DISPATCH_KEY, m) {
  m.impl("addbmm", addbmm_kernel);
  m.impl("addmv", addmv_kernel);
}

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  m.impl(
      "matmul.out", function_rule<at::_ops::matmul_out, matmul_out_function>);
}

} // namespace shardtensor::detail
