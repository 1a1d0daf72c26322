#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor {

class ShardTensorImpl;
namespace detail {
struct ViewGeometry;
}

/// Note [Constants]
/// A tensor whose elements are all alike, as factories make them, needs no
/// memory, and no layout, before somebody writes into it. Until then it is a
/// Replicate ShardTensor whose local tensor is one number, expanded; operators
/// read it as any other. The first write gives it memory, in a layout that fits
/// what is written. Its views and detached copies must show what was written,
/// too: each knows how it is seen from the whole and takes its part of the new
/// memory when it is next looked at, so that nothing depends on which of them
/// is still alive on a rank.
///
/// Example: out = zeros(2, 3, 64, 33) on 2 ranks; out[:, :, :8, :8] = f(x), cut
/// on dim 1 as [2, 1], makes out one that is cut on dim 1 as [2, 1].
class Constant {
 public:
  /// `value` is 0-d and plain.
  Constant(
      at::Tensor value,
      MeshPtr mesh,
      std::vector<int64_t> sizes,
      bool is_zero);

  const MeshPtr& mesh() const {
    return mesh_;
  }
  const std::vector<int64_t>& sizes() const {
    return sizes_;
  }
  at::ScalarType dtype() const {
    return value_.scalar_type();
  }
  /// As far as the host knows.
  bool is_zero() const {
    return is_zero_;
  }
  /// Who has its data may write without being seen.
  void forget_zero();
  bool is_written() const {
    return written_.defined();
  }
  /// The whole tensor after the first write began.
  const at::Tensor& written() const {
    return written_;
  }
  /// Gives it memory, for a write into `target`, itself or a view of it.
  void write(const SpecPtr& layout, at::TensorImpl& target);

 private:
  at::Tensor value_;
  MeshPtr mesh_;
  std::vector<int64_t> sizes_;
  bool is_zero_;
  at::Tensor written_;
};

/// How a tensor is seen from a constant: the constant itself without `view`.
struct ConstantView {
  std::shared_ptr<Constant> constant;
  std::function<at::Tensor(const at::Tensor&)> view;
};

/// A Replicate ShardTensor of which every element is the 0-d plain tensor
/// `value`, equal on all ranks, known to be zero or not. No communication.
at::Tensor constant(
    const at::Tensor& value,
    const MeshPtr& mesh,
    std::vector<int64_t> sizes,
    bool is_zero = false);

/// Null for a tensor that is no constant, or one that was written.
const ConstantView* constant_view_of(const at::Tensor& tensor);

/// What a constant or a view of one shows of the whole, in the whole's
/// elements: of the real numbers in complex ones, dims whose rows begin at real
/// and at imaginary parts have stride 0. None of a view as another dtype.
std::optional<detail::ViewGeometry> geometry(const ConstantView& seen);

/// Gives a constant, or what `tensor` is a view of, the layout that fits a
/// value of this layout; Replicate without one. No communication.
void begin_write(ShardTensorImpl& tensor, const SpecPtr& value = nullptr);

} // namespace shardtensor
