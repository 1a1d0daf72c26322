#include "shardtensor/tensor/moved_view.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "shardtensor/tensor/constant.h"
#include "shardtensor/tensor/keys.h"
#include "shardtensor/tensor/redistribute.h"
#include "shardtensor/tensor/shard_tensor_impl.h"
#include "shardtensor/tensor/shown_elements.h"

namespace shardtensor {

using namespace detail;
namespace {

// Inference tensors have no version: any write makes their moved views stale.
std::atomic<int64_t> inference_writes{0};
// Data that tensors with versions of their own share: none of these tells.
std::atomic<int64_t> shared_data_writes{0};
constexpr std::array<int64_t, 2> kNeverSeen{-1, -1};

std::shared_ptr<MovedView> redistributed_view(
    const at::Tensor& copy,
    const SpecPtr& copy_spec,
    const at::Tensor& source,
    const at::Tensor& of) {
  const auto& own = impl_of(of)->spec();
  const auto way = [](const SpecPtr& from, const SpecPtr& to) {
    return [from, to](const at::Tensor& local) {
      return redistribute_local(local, from, to);
    };
  };
  return std::make_shared<MovedView>(
      copy,
      source,
      MovedView::Ways{way(own, copy_spec), way(copy_spec, own)},
      impl_of(of)->moved_view(),
      of);
}

/// PyTorch warns of index_put_ into an expanded tensor.
struct Quiet : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

at::Tensor bytes_of(const at::Tensor& local) {
  const auto plain = local.resolve_conj().resolve_neg().contiguous();
  return plain.unsqueeze(-1).view(at::kByte);
}

/// Where two tensors differ, also by the sign of a zero or the bits of a NaN.
at::Tensor bytes_differ(const at::Tensor& left, const at::Tensor& right) {
  return bytes_of(left).ne(bytes_of(right)).any(-1);
}

/// Whether elements may lie in one place. PyTorch lets windows be written then,
/// and the order of its loops says which value lasts.
bool has_shared_places(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || tensor.is_non_overlapping_and_dense()) {
    return false;
  }
  std::vector<std::pair<int64_t, int64_t>> dims; // stride and last row
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) {
      dims.emplace_back(tensor.stride(dim), tensor.size(dim) - 1);
    }
  }
  std::ranges::sort(dims);
  int64_t reach = 0;
  for (const auto& [stride, last] : dims) {
    if (stride <= reach) {
      return true;
    }
    reach += stride * last;
  }
  return false;
}

void check_rows_apart(const at::Tensor& tensor, MovedView& moved) {
  if (moved.shares_rows() && has_shared_places(tensor)) {
    moved.forget();
    TORCH_CHECK(
        false,
        "write: unsupported operation: more than one element of the written-to "
        "tensor refers to a single memory location, in windows of a dim that "
        "is cut (sizes ",
        tensor.sizes(),
        ", strides ",
        tensor.strides(),
        "). Write into windows that share no elements, into the tensor that "
        "they are of, or into a clone().");
  }
}

} // namespace

MovedView::MovedView(
    at::Tensor copy,
    at::Tensor source,
    Ways ways,
    std::shared_ptr<MovedView> outer,
    const at::Tensor& of)
    : copy_(std::move(copy)),
      source_(std::move(source)),
      ways_(std::move(ways)),
      outer_(std::move(outer)),
      pushes_changes_(shares_rows() || has_shared_places(of)),
      has_version_(!of.is_inference()) {
  if (has_version_) {
    version_ = of.unsafeGetTensorImpl()->version_counter();
  }
  note_seen();
}

std::array<int64_t, 2> MovedView::writes() const {
  return has_version_
      ? std::array<int64_t, 2>{version_.current_version(), shared_data_writes}
      : std::array<int64_t, 2>{inference_writes, 0};
}

bool MovedView::is_stale() const {
  return seen_ != writes();
}

void MovedView::note_seen() {
  seen_ = writes();
}

void MovedView::pull() {
  if (outer_) {
    outer_->pull();
  }
  if (is_stale()) {
    note_seen();
    std::optional<c10::InferenceMode> as_it_was_made;
    if (!has_version_) {
      as_it_was_made.emplace();
    }
    at::NoGradGuard no_grad;
    copy_.copy_(ways_.to_copy(source_));
  }
}

void MovedView::push() {
  at::NoGradGuard no_grad;
  if (pushes_changes_) {
    push_changes();
  } else {
    source_.copy_(ways_.to_source(copy_));
  }
  if (outer_) {
    outer_->push();
  }
}

/// Of the places that stand for one element those that changed have its value;
/// the others have to be fetched.
void MovedView::push_changes() {
  const auto changed = bytes_differ(copy_, ways_.to_copy(source_));
  const auto zero = at::zeros({}, copy_.options());
  const auto values = ways_.to_source(at::where(changed, copy_, zero));
  const auto written = ways_.to_source(changed);
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warning(&quiet);
  source_.index_put_({written}, values.index({written}));
  seen_ = kNeverSeen;
}

void MovedView::forget() {
  seen_ = kNeverSeen;
  if (outer_) {
    outer_->forget();
  }
}

const at::Tensor& MovedView::pack() {
  copy_ = copy_.clone(at::MemoryFormat::Contiguous);
  return copy_;
}

ViewSource view_source(const at::Tensor& tensor, const SpecPtr& wanted) {
  auto* impl = impl_of(tensor);
  if (function_level_is_left_out()) {
    begin_write(*impl); // nobody notes there what is a view of a constant
  }
  if (!impl->constant_view()) {
    impl->separate_elements();
  }
  const auto& local = impl->local();
  const auto& own = impl->spec();
  if (!wanted || wanted == own) {
    return {local, impl->moved_view()};
  }
  auto copy =
      redistribute_local(local, own, wanted, tensor.suggest_memory_format());
  if (copy.is_alias_of(local)) {
    copy = copy.clone();
  }
  return {copy, redistributed_view(copy, wanted, local, tensor)};
}

ViewSource contiguous_source(ViewSource source, const at::Tensor& tensor) {
  const auto* impl = impl_of(tensor);
  if (source.moved != impl->moved_view()) {
    source.local = source.moved->pack();
    return source;
  }
  auto copy = source.local.clone(at::MemoryFormat::Contiguous);
  return {copy, redistributed_view(copy, impl->spec(), source.local, tensor)};
}

at::Tensor wrap_view(
    const at::Tensor& local,
    const SpecPtr& spec,
    at::IntArrayRef strides,
    const at::Tensor& tensor,
    const ViewSource& source,
    std::optional<int64_t> offset) {
  const SameInference same(*impl_of(tensor));
  auto result = wrap(local, spec, strides);
  note_view_place(result, tensor, offset);
  const auto begin =
      tensor.storage_offset() * tensor.element_size() / result.element_size();
  impl_of(result)->set_storage_offset(begin + offset.value_or(0));
  impl_of(result)->set_moved_view(source.moved);
  impl_of(result)->set_shares_memory();
  impl_of(result)->set_known_zeros(
      impl_of(tensor)->known_zeros(), /*of_base=*/true);
  impl_of(tensor)->set_shares_memory();
  if (impl_of(tensor)->has_other_versions()) {
    impl_of(result)->note_other_version();
  }
  return result;
}

void note_written(const at::Tensor& tensor) {
  if (tensor.is_inference()) {
    inference_writes += 1;
  } else if (impl_of(tensor)->has_other_versions()) {
    shared_data_writes += 1;
  }
  if (const auto& moved = impl_of(tensor)->moved_view()) {
    check_rows_apart(tensor, *moved);
    moved->push();
  }
}

} // namespace shardtensor
