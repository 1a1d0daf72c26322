#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "shardtensor/layout/shard_spec.h"
#include "shardtensor/rules/index/rows.h"

namespace shardtensor::detail {

// Note [Rows that are made]
// What reduces into rows often makes them: zeros(nodes, channels), into which
// edges add their messages, or the gradient of x[index]. Such a constant has no
// layout yet. It gets that of the rows that an index laid out alike has read or
// reduced into before, so that nodes that are made lie as those that are there,
// and no rank makes all of them; large ones that nothing is known of are cut
// as torch.chunk does. Small ones stay whole: every rank reduces its part of
// the source, and the ranks' terms are merged. Other dims are cut as those of
// the source, or of the values that are put into them.

/// Reductions of the elements of a source into rows of a tensor.
struct RowReduction {
  const char* op;
  at::Tensor index; // a ShardTensor of integers
  at::Tensor source; // the index's dims in the place of `dim`; may be undefined
  int64_t dim;
  std::string reduce; // sum, prod, amax or amin
  bool may_be_negative = false;
  bool counts = false; // are asked for
};

struct RowTerms {
  SpecPtr layout; // in which the tensor takes them
  at::Tensor rows; // local; rows that no element names are neutral
  at::Tensor counts; // of the elements that name each row, int64 of one dim
};

/// Those for `self`, without gathering source or index; none where another way
/// is needed. Communication: that of a RowExchange, or one merge of self's rows
/// where every rank has them.
std::optional<RowTerms> row_terms(
    const at::Tensor& self,
    const RowReduction& call);

/// Notes how rows lie that an index laid out as `index` has met.
void note_row_layout(const SpecPtr& index, const SpecPtr& rows);

/// How a new `self` takes what is put into rows that a cut index names along
/// dim `dim`, see Note [Rows that are made]; null where they say nothing of it.
/// Values have the index's dims in the place of `dim`, or are a number.
SpecPtr layout_of_put_rows(
    const at::Tensor& self,
    const at::Tensor& index,
    int64_t dim,
    const at::Tensor& values);

// Note [Layouts of what is read]
// The gradient of x[i] is made of zeros, whose layout nobody tells, and rows
// put into them. Where whole indices name rows of a cut dim, each rank could
// put them into its own part of it. So reading notes how x lies, and who puts
// rows of the gradient's layout into zeros of x's sizes asks for the last one
// noted: a hint, the same on every rank.

/// `result` is x[given].
void note_read_layout(
    const at::Tensor& x,
    const Indices& given,
    const at::Tensor& result);

/// Null where nothing was noted for such values.
SpecPtr find_read_layout(
    const at::Tensor& self,
    const std::vector<int64_t>& named_dims,
    const at::Tensor& values);

/// Before self is written, in this layout if it is new; without: in any.
void begin_row_write(const at::Tensor& self, const SpecPtr& layout = nullptr);

} // namespace shardtensor::detail
