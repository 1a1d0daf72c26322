#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/string_view.h>

#include "shardtensor/comm/primitives/exchange.h"
#include "shardtensor/layout/shard_spec.h"

namespace shardtensor::detail {

// Note [Rows by a cut index]
// In x[index], where ranks hold parts of x's rows and parts of the index (the
// edges of a graph), each rank lacks the rows that its part names and others
// own. It asks their owners once, and keeps the answer as long as the index
// stays what it is, or is made anew of the same values (Note [Indices made
// anew]): a static graph is planned once, and from then on a call costs one
// message to each rank whose rows are named, and none where all are its own.
// Adding to rows is the same way back. Memory: as much as the own part of the
// index.

/// 128 bits of an index, which another one does not have but by chance.
using IndexDigest = std::array<int64_t, 2>;

/// Of the elements in their order. A device is waited for.
IndexDigest digest_of(const at::Tensor& index);

/// Which rows go where for one index of rows cut in one way; see the note.
class RowExchange {
 public:
  /// `named_rows`: those that the own part of an index laid out as `index_spec`
  /// names, flat. `rows`: the layout of a tensor of one dim, cut along axes
  /// that all cut `index_spec`, too. `whole`: the rows that the whole index
  /// names, where every rank has it. Communication: none then, else two
  /// exchanges of numbers, and a reduced one. On meta none names others' rows.
  RowExchange(
      const at::Tensor& named_rows,
      SpecPtr index_spec,
      const SpecPtr& rows,
      const at::Tensor& whole = {});

  /// Whether the own part of another index laid out alike needs another
  /// exchange, for it names other rows.
  at::Tensor differs_from(const at::Tensor& named_rows) const;

  /// Whether it was made for a whole index that names rows of this digest.
  bool is_of_whole(const IndexDigest& rows) const {
    return whole_ == rows;
  }

  /// The layout in which the index is used.
  const SpecPtr& index_spec() const {
    return index_spec_;
  }
  /// For each element of the own index, flat: where the row it names is among
  /// the own rows and, behind them, those of others.
  const at::Tensor& places() const {
    return places_;
  }
  int64_t table_rows() const {
    return own_rows_ + other_rows_;
  }
  int64_t other_rows() const {
    return other_rows_;
  }

  /// How many elements of the whole index name each own row. Communication:
  /// that of own_rows() at the first call.
  const at::Tensor& counts() const;

  /// Which elements of the own index are the last of the whole one to name
  /// their row. Communication: as in table() and own_rows(), at the first call.
  const at::Tensor& last_elements() const;

  /// The own rows and, behind them along `dim`, those of others. Communication:
  /// one message to and from each rank concerned.
  at::Tensor table(const at::Tensor& own, int64_t dim) const;

  /// The rows of others that `table` holds, in the order of their numbers.
  /// Differentiable, whether any is named or not. Communication: as in table().
  at::Tensor others(const at::Tensor& own, int64_t dim) const;
  /// The same of what autograd doesn't see; `meanwhile` runs while the messages
  /// are under way.
  at::Tensor others_during(
      const at::Tensor& own,
      int64_t dim,
      c10::function_ref<void()> meanwhile) const;
  /// The adjoint of others(), differentiable: the sums that reach own rows.
  at::Tensor returned(const at::Tensor& others, int64_t dim) const;

  /// What ranks hold for rows of others, with them: in the order of ranks, some
  /// of lower ones. Communication: as in table().
  struct Arrived {
    at::Tensor rows; // own ones
    at::Tensor values; // along `dim`
    int64_t of_lower_ranks;
  };
  Arrived arrived(const at::Tensor& others, int64_t dim) const;

  /// What `table` holds for rows of others reaches their owners: the own rows,
  /// joined with what arrives by "sum", "prod", "amax" or "amin".
  /// Communication: as in table().
  at::Tensor own_rows(
      const at::Tensor& table,
      int64_t dim,
      c10::string_view reduce) const;

 private:
  /// What the others name of the own rows: they say so, or the whole index
  /// does.
  void ask_others(const at::Tensor& named_of_others, const ShardSpec& rows);
  void look_up_others(const at::Tensor& whole, const Partition& rows);
  EncodedExchange encoded(const at::Tensor& x, int64_t dim) const;
  at::Tensor all_to_all(const at::Tensor& x, int64_t dim, bool back) const;

  SpecPtr index_spec_;
  std::string group_;
  std::optional<IndexDigest> whole_; // of the rows that a whole index names
  at::Tensor places_;
  at::Tensor rows_of_others_; // those that places name
  at::Tensor sent_rows_; // own rows that others name, rank by rank
  std::vector<int64_t> sent_; // how many, by rank
  std::vector<int64_t> received_;
  int64_t first_row_ = 0; // of the own ones
  int64_t own_rows_ = 0;
  int64_t other_rows_ = 0;
  mutable at::Tensor counts_;
  mutable at::Tensor last_elements_;
  bool silent_ = false; // no rank names rows of others
};

/// The one for `index` along dim `dim` of tensors laid out as `spec`; null
/// where another way is needed: the index isn't cut by all axes that cut the
/// dim, is traced, or they have no common process group. Raises on all ranks
/// for an index out of bounds; negative ones count from the end if they may. It
/// is made anew unless these elements were met before: see Note [Shown
/// elements] and Note [Indices made anew]. Communication: for elements that
/// were not met as these, a reduction of a few numbers; that of RowExchange's
/// constructor, when made.
std::shared_ptr<const RowExchange> row_exchange(
    const char* op,
    const at::Tensor& index,
    const SpecPtr& spec,
    int64_t dim,
    bool may_be_negative);

/// Plans for `cut`, which is `whole`, an index that every rank has: that
/// row_exchange() then takes. Raises as it does. No communication.
void plan_whole_index(
    const char* op,
    const at::Tensor& whole,
    const at::Tensor& cut,
    const SpecPtr& spec,
    int64_t dim,
    bool may_be_negative);

/// `spec` with the dim `dim` replaced by those of the index.
SpecPtr rows_spec(
    const RowExchange& exchange,
    const SpecPtr& spec,
    int64_t dim);

/// self[:, index, :] by an exchange of rows.
at::Tensor read_rows(
    const RowExchange& exchange,
    const at::Tensor& local,
    const SpecPtr& spec,
    int64_t dim);

/// What `source`, laid out as rows_spec, gives the own rows: each element of
/// the index reduces its row of the source into the row that it names, starting
/// from the reduction's neutral element.
at::Tensor reduce_rows_by_index(
    const RowExchange& exchange,
    const at::Tensor& source,
    int64_t dim,
    c10::string_view reduce);

/// What leaves a reduction by sum, prod, amax or amin as it is.
at::Scalar neutral_of(c10::string_view reduce, at::ScalarType dtype);

/// Row i of the source is reduced into rows[places[i]], along `dim`.
void reduce_into(
    const at::Tensor& rows,
    int64_t dim,
    const at::Tensor& places,
    const at::Tensor& source,
    c10::string_view reduce);

} // namespace shardtensor::detail
