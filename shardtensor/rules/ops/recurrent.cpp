#include <algorithm>
#include <array>
#include <string>

#include <ATen/ops/constant_pad_nd.h>
#include <torch/library.h>

#include "shardtensor/comm/primitives/primitives.h"
#include "shardtensor/dispatch/arguments/joined_operands.h"
#include "shardtensor/dispatch/arguments/promotion.h"
#include "shardtensor/dispatch/arguments/tensor_arguments.h"
#include "shardtensor/dispatch/function_level.h"
#include "shardtensor/layout/plans/view_plan.h"
#include "shardtensor/tensor/gradients/parameter_gradients.h"
#include "shardtensor/tensor/keys.h"

// Recurrent layers and cells. Samples know nothing of each other: where they
// alone are cut, each rank calls the layer on its own ones, as one device does.
// Where steps or features are cut, samples are cut in their place: one exchange
// of the input and, for steps, one of the output, which lies as the input does.
//
// Where samples are too few the layer is left alone, and the operators below it
// gather what each step needs, on a GPU the whole input. They also do dropout,
// whose numbers are the whole tensor's, and weights that are cut, samples being
// cut instead of steps meanwhile.

namespace shardtensor::detail {
namespace {

using torch::jit::Stack;

/// Which dims of the input, and of the states, are what.
struct Dims {
  std::vector<int64_t> others; // whole in a local call: steps, features
  int64_t samples;
  int64_t samples_of_states;
};

Dims dims_of(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& name = op.operator_name().name;
  if (name.find("_cell") != std::string::npos) {
    return {{1}, 0, 0};
  }
  const bool batch_first = stack.back().toBool();
  return {{batch_first ? 1 : 0, 2}, batch_first ? 0 : 1, 1};
}

/// A call's arguments: the input, one or more states, weights, numbers.
class Layer {
 public:
  Layer(const c10::OperatorHandle& op, Stack& stack)
      : op_(op),
        stack_(stack),
        base_(stack.size() - op.schema().arguments().size()),
        name_(c10::toString(op.operator_name())),
        dims_(dims_of(op, stack)) {}

  const char* name() const {
    return name_.c_str();
  }
  /// Whether samples can be cut instead of what is.
  bool cuts_samples();
  /// Whether ranks may call it, each on its samples.
  bool runs_on_pieces() const;
  void run_on_pieces();
  template <class Below>
  void run_below(const Below& below);

 private:
  const at::Tensor& input() const {
    return stack_[base_].toTensor();
  }
  std::vector<at::Tensor> tensors(size_t first, size_t last) const {
    std::vector<at::Tensor> found;
    for (size_t i = first; i < last; ++i) {
      visit_tensors(stack_[base_ + i], [&](const at::Tensor& tensor) {
        found.push_back(tensor);
      });
    }
    return found;
  }
  std::vector<at::Tensor> states() const {
    return tensors(1, 2);
  }
  std::vector<at::Tensor> weights() const {
    return tensors(2, stack_.size() - base_);
  }
  bool draws() const;
  SpecPtr layout(at::IntArrayRef local, int64_t samples) const;
  at::Tensor piece(const at::Tensor& given, int64_t samples) const;
  at::Tensor whole(const at::Tensor& local, bool is_state) const;
  bool has_cut_steps() const {
    return dims_.others.size() > 1 && given_->is_sharded(dims_.others[0]);
  }
  void show_steps_cut();

  const c10::OperatorHandle& op_;
  Stack& stack_;
  const size_t base_;
  const std::string name_;
  const Dims dims_;
  SpecPtr given_; // of the input
  SpecPtr wanted_; // with samples alone cut
};

/// Whether numbers are drawn between the layers.
bool Layer::draws() const {
  const auto& arguments = op_.schema().arguments();
  double dropout = 0;
  bool train = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dropout") {
      dropout = stack_[base_ + i].toDouble();
    } else if (arguments[i].name() == "train") {
      train = stack_[base_ + i].toBool();
    }
  }
  return train && dropout != 0;
}

bool Layer::cuts_samples() {
  const auto dims = static_cast<int64_t>(dims_.others.size()) + 1;
  if (!is_shard_tensor(input()) || input().dim() != dims) {
    return false;
  }
  const auto count = input().size(dims_.samples);
  for (const auto& state : states()) {
    if (state.dim() <= dims_.samples_of_states ||
        state.size(dims_.samples_of_states) != count) {
      return false; // it raises
    }
  }
  given_ = without_partial(spec(input()));
  wanted_ = whole_dims(given_, dims_.others, {dims_.samples});
  const auto& before = given_->placements();
  const auto& after = wanted_->placements();
  for (size_t axis = 0; axis < before.size(); ++axis) {
    if (before[axis].is_shard() && !after[axis].is_shard()) {
      return false;
    }
  }
  return true;
}

bool Layer::runs_on_pieces() const {
  const auto shared = weights();
  return !draws() &&
      std::none_of(shared.begin(), shared.end(), [](const at::Tensor& weight) {
        return is_shard_tensor(weight) && spec(weight)->is_sharded();
      });
}

/// Of a tensor whose dim `samples` is cut as the input's is.
SpecPtr Layer::layout(at::IntArrayRef local, int64_t samples) const {
  auto sizes = local.vec();
  sizes[samples] = wanted_->size(dims_.samples);
  std::vector<int64_t> from(sizes.size(), -1);
  from[samples] = dims_.samples;
  return with_dims(wanted_, sizes, from);
}

/// A rank without samples gets one of zeros: it shares the weights' gradients
/// and the errors.
at::Tensor Layer::piece(const at::Tensor& given, int64_t samples) const {
  const auto tensor = promote_operand(given, wanted_->mesh(), name());
  const auto local =
      to_local(redistribute(tensor, layout(tensor.sizes(), samples)));
  if (local.size(samples) > 0) {
    return local.contiguous(); // as cuDNN wants states
  }
  std::vector<int64_t> pad(2 * (local.dim() - samples), 0);
  pad.back() = 1;
  return at::constant_pad_nd(local, pad);
}

/// Outputs with samples first are views of those with steps first, as those of
/// one device are.
at::Tensor Layer::whole(const at::Tensor& result, bool is_state) const {
  const auto samples = is_state ? dims_.samples_of_states : dims_.samples;
  const auto count = wanted_->local_sizes()[dims_.samples];
  const auto local = result.narrow(samples, 0, count);
  if (local.dim() < 3 || samples != 0) {
    return from_local(local, layout(local.sizes(), samples));
  }
  const auto turned = local.transpose(0, 1);
  return from_local(turned, layout(turned.sizes(), 1)).transpose(0, 1);
}

/// The output lies as the input was given.
void Layer::show_steps_cut() {
  const auto shown = whole_dims(given_, {2}, {dims_.samples});
  const auto output = stack_[base_].toTensor();
  stack_[base_] =
      redistribute(output, with_dims(shown, output.sizes().vec(), {0, 1, -1}));
}

template <class Below>
void Layer::run_below(const Below& below) {
  if (!has_cut_steps()) {
    below();
    return;
  }
  stack_[base_] = redistribute(
      input(), whole_dims(given_, {dims_.others[0]}, {dims_.samples}));
  below();
  show_steps_cut();
}

void Layer::run_on_pieces() {
  const auto shared = weights();
  check_promotions(shared, name());
  const auto locals =
      shared_weights(shared, wanted_->mesh(), wanted_->sharded_axes());
  stack_[base_] = piece(input(), dims_.samples);
  stack_[base_ + 1] =
      with_tensors(stack_[base_ + 1], [&](const at::Tensor& state) {
        return piece(state, dims_.samples_of_states);
      });
  auto next = locals.begin();
  for (size_t i = base_ + 2; i < stack_.size(); ++i) {
    stack_[i] =
        with_tensors(stack_[i], [&](const at::Tensor&) { return *next++; });
  }
  op_.callBoxed(stack_);
  for (size_t i = base_; i < stack_.size(); ++i) {
    stack_[i] = whole(stack_[i].toTensor(), i > base_);
  }
  if (has_cut_steps()) {
    show_steps_cut();
  }
}

void recurrent_function(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    Stack* stack) {
  const auto below = [&] { run_below_function_level(op, keys, stack); };
  if (keys.has_any(kTransformKeys) || must_join(op, keys, *stack)) {
    below();
    return;
  }
  Layer layer(op, *stack);
  const CommScope scope(layer.name());
  if (!layer.cuts_samples()) {
    below();
  } else if (layer.runs_on_pieces()) {
    layer.run_on_pieces();
  } else {
    layer.run_below(below);
  }
}

constexpr std::array kRecurrent{
    "gru.input",
    "gru_cell",
    "lstm.input",
    "lstm_cell",
    "rnn_relu.input",
    "rnn_relu_cell",
    "rnn_tanh.input",
    "rnn_tanh_cell",
};

} // namespace

TORCH_LIBRARY_IMPL(aten, SHARDTENSOR_FUNCTION_KEY, m) {
  for (const char* name : kRecurrent) {
    m.impl(
        name, torch::CppFunction::makeFromBoxedFunction<&recurrent_function>());
  }
}

} // namespace shardtensor::detail
