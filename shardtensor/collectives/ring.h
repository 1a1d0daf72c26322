#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

namespace shardtensor {

/// One step of a ring over a group, for programs that work on local tensors: x
/// goes to the rank `step` places further on, around the end, and the result is
/// what the rank `step` places back sends, of receive_sizes. Negative steps go
/// the other way, which is the adjoint; differentiable to any order. Sizes that
/// the sender does not have are an error on every rank. Communication: one
/// message each way, and before it three integers from each rank to each.
/// Thread safety / ordering: as in primitives.h.
///
/// Example: ranks 0, 1 and 2 hold {1}, {2} and {3}: with step 1 they get {3},
/// {1} and {2}.
at::Tensor ring_step(
    const at::Tensor& x,
    int64_t step,
    c10::IntArrayRef receive_sizes,
    const std::string& group);

/// What a rank does on a tour of the ring: it meets every rank's block, its own
/// and those of the ranks before it, nearest first. While a stop is under way
/// the next block travels here, and what the last stop made for its block's
/// owner travels there.
struct RingStops {
  /// With the own block, while the first one of another rank is on its way.
  std::function<void()> own;
  /// With the block of another rank. Returns what its owner gets, of the
  /// block's sizes, dtype and device, or undefined for zeros; ignored where
  /// nothing is `returned`.
  std::function<at::Tensor(int64_t owner, const at::Tensor& block)> other;
  /// Takes what another rank made for the own block. Without it nothing goes
  /// back.
  std::function<void(const at::Tensor& term)> returned;
  /// More work with the own block, while the last term is on its way back.
  std::function<void()> own_rest;
};

/// One tour. `sizes` are those of every rank's block, in rank order, or empty:
/// ranks tell each other theirs, of one number of dims. Blocks may differ in
/// all sizes and be empty. Told sizes or dtypes that differ between ranks are
/// an error on every rank, and so are tensors of torch.func's transforms and
/// what a stop raises on one of them: after it no stop is called there, but
/// messages go on. Seen neither by autograd nor by a compiler. Communication:
/// three integers from each rank to each before and after, an all-gather of the
/// sizes where none are told, then per other rank one message each way, and one
/// more each way where terms are returned; none waits for another stop of a
/// third rank. Thread safety / ordering: as in primitives.h.
///
/// Example: ranks 0, 1 and 2 hold {1}, {2} and {3}: rank 0 meets {1}, {3} from
/// rank 2 and {2} from rank 1.
void ring_tour(
    const at::Tensor& block,
    const std::vector<std::vector<int64_t>>& sizes,
    const std::string& group,
    const RingStops& stops);

/// A function of a block, of any rank, and of tensors that stay here.
using RingTerm = std::function<
    at::Tensor(const at::Tensor& block, const std::vector<at::Tensor>& own)>;

/// The sum of term(block, own) over every rank's block, in the order of
/// ring_tour. Differentiable once, also where the term is: backward is a tour
/// on which it is computed again, and the gradient of each block travels to its
/// owner. What else the term uses gets no gradient. Communication, ordering and
/// errors: as ring_tour, in backward with terms; a sum that autograd records on
/// some ranks alone is an error, too, and so is a block with a forward-mode
/// tangent.
///
/// Example: forces between bodies that no rank holds all of,
///   ring_sum(attraction, bodies, {bodies}, sizes, mesh->group()).
at::Tensor ring_sum(
    const RingTerm& term,
    const at::Tensor& block,
    const std::vector<at::Tensor>& own,
    const std::vector<std::vector<int64_t>>& sizes,
    const std::string& group);

namespace detail {

/// ring_tour where all ranks are known to agree: nothing is compared, and what
/// a stop raises on one rank leaves the others waiting.
void ring_tour_of_agreed(
    const at::Tensor& block,
    const std::vector<std::vector<int64_t>>& sizes,
    const std::string& group,
    const RingStops& stops);

/// ring_tour by another name, for errors. Ranks compare the `note`, too; what
/// it raises on one rank is an error on every rank. The sizes of every rank's
/// block.
std::vector<std::vector<int64_t>> ring_tour_as(
    const char* name,
    const at::Tensor& block,
    const std::vector<std::vector<int64_t>>& sizes,
    const std::string& group,
    const RingStops& stops,
    c10::function_ref<std::string()> note = [] { return std::string(); });

} // namespace detail

} // namespace shardtensor
