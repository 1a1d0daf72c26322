#include <utility>
#include <vector>

#include <ATen/ops/_sparse_mm.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/arguments/sparse_operands.h"
#include "shardtensor/layout/global_rows.h"
#include "shardtensor/rules/matrix/whole_factor.h"
#include "shardtensor/tensor/gradients/parameter_gradients.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor.h"

// Products of a plain sparse matrix and a ShardTensor, Note [Sparse operands].
// The matrix is whole on every rank, so nothing of it moves. Of an operand cut
// in columns each rank has all that its columns of the product need. Of one cut
// in rows it multiplies its rows with the matrix's columns of these, which
// gives a term of the product; or the operand is cut in columns for a while,
// where that moves less. The product is then cut in rows as the operand was.
// Samples of a batch are cut on both sides.

namespace shardtensor::detail {
namespace {

/// A product of local matrices.
using LocalProduct = at::Tensor (*)(const at::Tensor&, const at::Tensor&);

/// mm, but for the gradient of the matrix: that of its entries alone.
at::Tensor mm_of_entries(const at::Tensor& matrix, const at::Tensor& x) {
  return at::_sparse_mm(matrix, x);
}

bool is_sparse(const at::Tensor& tensor) {
  return tensor.layout() != at::kStrided;
}

bool needs_gradient(const at::Tensor& matrix) {
  return matrix.requires_grad() && at::GradMode::is_enabled();
}

// ---- layouts ----------------------------------------------------------------

/// That of the product of a matrix of `rows` rows and an operand laid out as
/// `x`: a sum along the axes that cut x's rows.
SpecPtr sparse_product_layout(int64_t rows, const SpecPtr& x) {
  auto sizes = x->sizes();
  std::vector<int64_t> from(x->dim());
  for (int64_t dim = 0; dim < x->dim(); ++dim) {
    from[dim] = dim;
  }
  sizes[x->dim() - 2] = rows;
  from[x->dim() - 2] = -1;
  return with_dims(x, sizes, from, Placement::partial(Reduce::Sum));
}

/// `rows` cut where `operand` is, in proportion.
Partition cut_alike(int64_t rows, const Partition& operand) {
  if (rows == operand.extent() || operand.period() == 0) {
    return rows == operand.extent()
        ? operand
        : Partition::chunked(rows, operand.pieces());
  }
  std::vector<int64_t> sizes;
  int64_t begin = 0;
  for (int64_t piece = 0; piece < operand.pieces(); ++piece) {
    const auto of = operand.interval(piece).end;
    const auto end =
        (2 * of * rows + operand.period()) / (2 * operand.period());
    sizes.push_back(end - begin);
    begin = end;
  }
  return Partition(sizes);
}

/// The product's layout at last: cut in rows by the axes that cut the operand's
/// rows. With so few rows that half of the ranks would get none it stays as it
/// comes.
SpecPtr layout_at_last(const SpecPtr& product, const SpecPtr& operand) {
  const auto rows = operand->dim() - 2;
  if (!operand->is_sharded(rows) ||
      2 * product->size(rows) <= operand->partition(rows).pieces()) {
    return product;
  }
  auto placements = product->placements();
  for (const auto axis : operand->axes(rows)) {
    placements[axis] = Placement::shard(rows);
  }
  ShardSpec::Partitions partitions(operand->dim());
  partitions[rows] = cut_alike(product->size(rows), operand->partition(rows));
  if (operand->is_sharded(rows + 1) && !operand->has_partial()) {
    partitions[rows + 1] = operand->partitions()[rows + 1];
  }
  return with_placements(product, placements, partitions);
}

/// The axes that cut rows, or have terms of a sum, cut columns instead; null
/// where that leaves a rank without any.
SpecPtr cut_in_columns(const SpecPtr& x) {
  const auto columns = x->dim() - 1;
  auto placements = x->placements();
  for (auto& placement : placements) {
    if (placement.is_shard(columns - 1) || placement.is_partial()) {
      placement = Placement::shard(columns);
    }
  }
  const auto result = with_placements(x, placements);
  const bool is_short = result->is_sharded(columns) &&
      result->partition(columns).has_empty_piece();
  return is_short ? nullptr : result;
}

/// The layout in which an operand is multiplied: its own, or one cut in columns
/// where fewer elements move for that than for the sum of the product.
SpecPtr needed_layout(int64_t product_rows, const SpecPtr& given) {
  const auto columns = cut_in_columns(given);
  if (!columns || columns == given) {
    return without_partial(given);
  }
  if (given->has_partial()) {
    return columns;
  }
  const auto product = sparse_product_layout(product_rows, columns);
  const auto moved = redistribute_cost(given, columns) +
      redistribute_cost(product, layout_at_last(product, given));
  const auto terms = given->partition(given->dim() - 2).pieces();
  return moved < product->numel() * (terms - 1) ? columns : given;
}

// ---- the matrix -------------------------------------------------------------

/// Where this rank's piece of a cut dim has each of its rows; -1: nowhere.
at::Tensor places_of_rows(
    const SpecPtr& spec,
    int64_t dim,
    const at::TensorOptions& options) {
  const auto mine = at::arange(spec->local_sizes()[dim], options);
  auto places = at::full({spec->size(dim)}, -1, options);
  return places.index_copy_(0, own_rows(*spec, dim, options), mine);
}

/// Entries of a matrix, to choose from.
struct Entries {
  at::Tensor indices;
  at::Tensor values;
  std::vector<int64_t> sizes;
};

/// Those that meet this rank's piece of `dim` of an operand laid out as `x`.
Entries entries_met(Entries all, const SpecPtr& x, int64_t dim) {
  const auto met = dim == x->dim() - 2 ? dim + 1 : dim; // of the matrix
  const auto places = places_of_rows(x, dim, all.indices.options())
                          .index_select(0, all.indices.select(0, met));
  const auto kept = places.ge(0).nonzero().squeeze(1);
  all.indices = all.indices.index_select(1, kept);
  all.indices.select(0, met).copy_(places.index_select(0, kept));
  all.values = all.values.index_select(0, kept);
  all.sizes[met] = x->local_sizes()[dim];
  return all;
}

/// The dims of an operand whose cut cuts the matrix: all but columns.
std::vector<int64_t> dims_met(const SpecPtr& x) {
  auto dims = x->sharded_dims();
  std::erase(dims, x->dim() - 1);
  return dims;
}

/// What this rank multiplies with its piece of an operand laid out as `x`.
at::Tensor own_matrix(const at::Tensor& matrix, const SpecPtr& x) {
  const auto dims = dims_met(x);
  if (dims.empty() && !needs_gradient(matrix)) {
    return matrix;
  }
  const auto sparse = matrix.to_sparse().coalesce();
  Entries entries{sparse.indices(), sparse.values(), sparse.sizes().vec()};
  if (needs_gradient(matrix)) {
    entries.values =
        shared_weights({entries.values}, x->mesh(), x->sharded_axes())[0];
  }
  for (const auto dim : dims) {
    entries = entries_met(std::move(entries), x, dim);
  }
  return at::sparse_coo_tensor(
      entries.indices,
      entries.values,
      entries.sizes,
      entries.values.options().layout(at::kSparse),
      /*is_coalesced=*/true);
}

// ---- products ---------------------------------------------------------------

/// PyTorch's gradient of `mm` is a dense one, of sparse.mm it is the entries'.
void check_sparse_operands(
    const char* op,
    const at::Tensor& matrix,
    const at::Tensor& x,
    bool with_gradient) {
  const auto dims = x.dim();
  TORCH_CHECK(
      matrix.dim() == dims && matrix.size(-1) == x.size(-2) &&
          matrix.sizes().slice(0, dims - 2) == x.sizes().slice(0, dims - 2),
      op,
      ": a sparse matrix of sizes ",
      matrix.sizes(),
      " cannot be multiplied with a ShardTensor of sizes ",
      x.sizes());
  TORCH_CHECK_NOT_IMPLEMENTED(
      with_gradient || !needs_gradient(matrix),
      op,
      ": the gradient of a sparse matrix would be a dense one; "
      "torch.sparse.mm, whose gradient has the matrix's entries, gives it "
      "beside a ShardTensor");
  check_promotion(matrix, op);
  if (check_mode()) {
    const auto entries = matrix.detach().to_sparse().coalesce();
    check_equal_on_all_ranks(entries.indices(), *spec(x)->mesh());
    check_equal_on_all_ranks(entries.values(), *spec(x)->mesh());
  }
}

/// Of dtypes that it doesn't take, a kernel may tell those ranks alone that
/// have something to multiply. So the others multiply one number.
void try_dtypes(
    const at::Tensor& matrix,
    const at::Tensor& x,
    LocalProduct local) {
  if (matrix._nnz() > 0 && x.numel() > 0) {
    return;
  }
  const at::NoGradGuard no_grad;
  const std::vector<int64_t> one(x.dim(), 1);
  local(
      at::ones(one, matrix.options().layout(at::kStrided)).to_sparse(),
      at::ones(one, x.options()));
}

/// matrix @ x, by `local` on this rank's parts.
at::Tensor sparse_product(
    const char* op,
    const at::Tensor& matrix,
    const at::Tensor& given,
    LocalProduct local) {
  check_sparse_operands(op, matrix, given, local == &mm_of_entries);
  const auto layout = needed_layout(matrix.size(-2), spec(given));
  const auto x = to_local(redistribute(given, layout));
  const auto part = own_matrix(matrix, layout);
  try_dtypes(part, x, local);
  const auto result = sparse_product_layout(matrix.size(-2), layout);
  return redistribute(
      from_local(local(part, x), result), layout_at_last(result, spec(given)));
}

/// The product of two matrices of any kind.
at::Tensor any_product(
    const char* op,
    const at::Tensor& left,
    const at::Tensor& right,
    LocalProduct local) {
  if (is_sparse(left) && is_shard_tensor(right)) {
    return sparse_product(op, left, right, local);
  }
  if (is_sparse(right) && is_shard_tensor(left)) {
    // PyTorch has no product of batches from this side: refused.
    return right.dim() == 2 ? sparse_product(op, right.t(), left.t(), local).t()
                            : local(left, promote(right, spec(left)->mesh()));
  }
  return local(left, right);
}

at::Tensor added_to_product(
    const at::Tensor& addend,
    const at::Tensor& product,
    const at::Scalar& given_beta,
    const at::Scalar& given_alpha) {
  const auto beta = factor_of(given_beta, product.scalar_type());
  const auto alpha = factor_of(given_alpha, product.scalar_type());
  if (beta.equal(0)) {
    return at::mul(product, alpha);
  }
  return at::add(at::mul(addend.expand(product.sizes()), beta), product, alpha);
}

at::Tensor mm_function(const at::Tensor& self, const at::Tensor& mat2) {
  return any_product("aten::mm", self, mat2, &at::mm);
}

at::Tensor bmm_function(const at::Tensor& self, const at::Tensor& mat2) {
  return any_product("aten::bmm", self, mat2, &at::bmm);
}

at::Tensor mv_function(const at::Tensor& self, const at::Tensor& vec) {
  TORCH_CHECK(vec.dim() == 1, "aten::mv: expected a vector of one dim");
  return any_product("aten::mv", self, vec.unsqueeze(1), &at::mm).squeeze(1);
}

at::Tensor addmm_function(
    const at::Tensor& self,
    const at::Tensor& mat1,
    const at::Tensor& mat2,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  const auto sum = any_product("aten::addmm", mat1, mat2, &at::mm);
  return added_to_product(self, sum, beta, alpha);
}

at::Tensor addmv_function(
    const at::Tensor& self,
    const at::Tensor& mat,
    const at::Tensor& vec,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  return added_to_product(self, at::mv(mat, vec), beta, alpha);
}

/// What torch.sparse.mm and torch.sparse.addmm are made of.
at::Tensor sparse_addmm_function(
    const at::Tensor& self,
    const at::Tensor& mat1,
    const at::Tensor& mat2,
    const at::Scalar& beta,
    const at::Scalar& alpha) {
  const auto sum =
      any_product("aten::_sparse_addmm", mat1, mat2, &mm_of_entries);
  return added_to_product(self, sum, beta, alpha);
}

const RegisterSparse sparse_products{
    {"aten::mm", sparse_function(&mm_function)},
    {"aten::bmm", sparse_function(&bmm_function)},
    {"aten::mv", sparse_function(&mv_function)},
    {"aten::addmm", sparse_function(&addmm_function)},
    {"aten::addmv", sparse_function(&addmv_function)},
    {"aten::_sparse_addmm", sparse_function(&sparse_addmm_function)},
};

} // namespace
} // namespace shardtensor::detail
