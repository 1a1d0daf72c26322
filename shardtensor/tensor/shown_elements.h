#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// Note [Shown elements]
// What ranks found out together about the values of a tensor (which rows an
// index names, and whose they are) holds as long as the tensor shows the same
// elements. It is known by identity and version of the tensor that has them,
// and by the place where a view stands in it: graph libraries take the rows of
// edge_index, and widen them, anew in each layer. The place follows from global
// sizes and strides. Nothing here comes from local memory: a rank whose part is
// empty would take other parts for the same one, and wait for none.

/// Which elements a ShardTensor shows. Equal ones show the same values, laid
/// out alike, on all ranks or on none; one that is not known equals none.
class ShownElements {
 public:
  bool operator==(const ShownElements& other) const;

  /// False for tensors without a version, or with several (`x.data`): nothing
  /// tells when they are written.
  bool is_known() const {
    return layout_ != nullptr;
  }
  /// Nobody can ask for them any more.
  bool are_gone() const {
    return base_.expired();
  }

 private:
  friend ShownElements shown_elements(const at::Tensor& tensor);

  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  Weak base_{at::Tensor().getIntrusivePtr()};
  /// Versions of the base and of the tensor, how often the base was set.
  std::array<int64_t, 3> changes_{};
  int64_t offset_ = 0;
  std::vector<int64_t> strides_;
  SpecPtr layout_;
};

ShownElements shown_elements(const at::Tensor& tensor);

/// Says that `view` begins `offset` elements behind the first one of `tensor`,
/// by nominal strides. Only integers, which may be an index, note it.
void note_view_place(
    const at::Tensor& view,
    const at::Tensor& tensor,
    std::optional<int64_t> offset);

} // namespace shardtensor::detail
