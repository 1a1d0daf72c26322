#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include "mirror.h"
#include "queue.h"

// Kernels of the guarded device: the CPU's, on the same memory, when their turn
// comes. What is CUDA's way, and not the CPU's, is an error here: operands on
// two devices.

namespace guarded {
namespace {

using at::Tensor;

// ---- any operator -----------------------------------------------------------

/// PyTorch takes indices on the host for these.
bool takes_host_tensors(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> names{
      "aten::index",
      "aten::index_put",
      "aten::index_put_",
      "aten::_index_put_impl_",
      "aten::_unsafe_index",
      "aten::_unsafe_index_put"};
  return names.count(op.schema().name()) > 0;
}

/// The host has to know the size of their results, or the result itself.
bool is_waited_for(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) ||
      op.hasTag(at::Tag::data_dependent_output);
}

/// The host says the state of their random numbers when it calls them, or what
/// they make is no tensor.
bool is_of_its_moment(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  return op.hasTag(at::Tag::nondeterministic_seeded) ||
      std::any_of(returns.begin(), returns.end(), [](const auto& made) {
           return !made.type()->isSubtypeOf(*c10::TensorType::get()) &&
               !made.type()->isSubtypeOf(*c10::ListType::ofTensors());
         });
}

/// How many rows a mask takes is in its numbers.
bool has_mask(const c10::IValue& indices) {
  if (!indices.isOptionalTensorList()) {
    return false;
  }
  const auto list = indices.toOptionalTensorVector();
  return std::any_of(list.begin(), list.end(), [](const auto& index) {
    return index && index->defined() &&
        (index->scalar_type() == at::kBool ||
         index->scalar_type() == at::kByte);
  });
}

using OnTensor = c10::function_ref<Tensor(const Tensor&)>;

/// `value` with each of its tensors replaced.
c10::IValue map_tensors(const c10::IValue& value, OnTensor replace) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorList()) {
      list.push_back(replace(x));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> x : value.toOptionalTensorList()) {
      list.push_back(x ? std::optional(replace(*x)) : std::nullopt);
    }
    return list;
  }
  return value;
}

/// As the host has it now; a number stays one.
Tensor snapshot(const Tensor& x) {
  Tensor copy = x.clone();
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

/// A tensor of zeros without memory is one by its dispatch key.
Tensor with_elements(const Tensor& made) {
  return made.defined() && made._is_zerotensor()
      ? at::zeros(made.sizes(), made.options())
      : made;
}

void copy_result(const Tensor& target, const Tensor& made) {
  TORCH_CHECK(
      target.sizes() == made.sizes(),
      "guarded: a kernel made a tensor of sizes ",
      made.sizes(),
      ", by its numbers, in place of ",
      target.sizes());
  const auto& from = made.storage();
  if (target.strides() == made.strides() &&
      target.storage_offset() == made.storage_offset() &&
      target.storage().nbytes() == from.nbytes()) { // also of one row, expanded
    std::memcpy(target.storage().mutable_data(), from.data(), from.nbytes());
  } else {
    target.copy_(made);
  }
}

// Note [Trials]
// What a kernel's results look like the host has to know when it calls it, but
// the kernel runs later. So it is tried on zeros first, for its sizes, strides
// and errors. What cannot be tried, or told from zeros, runs at once.

/// One call of an operator.
class Call {
 public:
  /// `kernel` has the CPU's kernel, and op's arguments.
  Call(
      const c10::OperatorHandle& op,
      const c10::OperatorHandle& kernel,
      const torch::jit::Stack& stack)
      : op_(op), kernel_(kernel) {
    const auto& schema = kernel.schema().arguments();
    const auto base = stack.size() - schema.size();
    for (size_t i = 0; i < schema.size(); ++i) {
      const auto* alias = schema[i].alias_info();
      add_argument(stack[base + i], alias && alias->isWrite());
    }
    check_devices();
  }

  torch::jit::Stack run() {
    return may_be_late() && try_out() ? run_later() : run_at_once();
  }

 private:
  struct Written {
    Tensor device;
    Tensor host;
    Tensor trial;
  };

  void add_argument(const c10::IValue& value, bool written) {
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      on_device_ = true;
      arguments_.emplace_back(c10::Device(c10::kCPU));
      trial_arguments_.emplace_back(c10::Device(c10::kCPU));
      return;
    }
    has_mask_ = has_mask_ || has_mask(value);
    std::vector<Tensor> tried; // in the order of `value`'s tensors
    arguments_.push_back(map_tensors(value, [&](const Tensor& x) {
      tried.push_back(trial_.on_host(x));
      return host_argument(x, written, tried.back());
    }));
    auto next = tried.begin();
    trial_arguments_.push_back(
        map_tensors(value, [&](const Tensor&) { return *next++; }));
  }

  Tensor host_argument(const Tensor& x, bool written, const Tensor& tried) {
    if (!is_guarded(x)) {
      writes_host_ = writes_host_ || (x.defined() && written);
      host_tensor_ = host_tensor_ ||
          (x.defined() && x.is_cpu() && (x.dim() > 0 || written));
      return x;
    }
    on_device_ = true;
    const bool resizes = written && x.storage().nbytes() == 0;
    const Tensor host = resizes
        ? at::empty(x.sizes(), x.options().device(c10::kCPU))
        : memory_.on_host(x);
    if (written) {
      written_.push_back({x, host, tried});
    }
    return host;
  }

  void check_devices() const {
    TORCH_CHECK(
        !on_device_ || !host_tensor_ || takes_host_tensors(op_),
        c10::toString(op_.operator_name()),
        ": expected all tensors to be on the same device, but found at least "
        "two devices, guarded:0 and cpu!");
  }

  bool may_be_late() const {
    return on_device_ && !writes_host_ && !has_mask_ && !is_waited_for(op_) &&
        !is_of_its_moment(op_);
  }

  /// See Note [Trials]. Leaves in `trial_arguments_` what was made.
  bool try_out() {
    try {
      kernel_.redispatchBoxed(
          c10::DispatchKeySet(c10::DispatchKey::CPU), &trial_arguments_);
    } catch (const std::exception&) {
      return false; // the real one raises, or it is the zeros' error
    }
    return std::all_of(written_.begin(), written_.end(), [](const auto& x) {
      return x.device.sizes() == x.trial.sizes();
    });
  }

  torch::jit::Stack run_later() {
    std::vector<Tensor> targets; // undefined: nothing to copy
    torch::jit::Stack results;
    for (const auto& value : trial_arguments_) {
      results.push_back(map_tensors(value, [&](const Tensor& x) {
        return result_of_trial(with_elements(x), targets);
      }));
    }
    const bool copies =
        std::any_of(targets.begin(), targets.end(), [](const Tensor& x) {
          return x.defined();
        });
    if (copies || !written_.empty()) {
      launch_with(std::move(targets));
    }
    return results;
  }

  Tensor result_of_trial(const Tensor& tried, std::vector<Tensor>& targets) {
    auto& target = targets.emplace_back();
    for (const auto& x : written_) {
      if (tried.is_same(x.trial)) {
        return x.device;
      }
    }
    if (!tried.defined() || !tried.is_cpu()) {
      return tried;
    }
    const bool is_new = !trial_.knows(tried);
    const Tensor result = trial_.on_device(tried);
    if (is_new) {
      target = memory_.on_host(result);
    }
    return result;
  }

  void launch_with(std::vector<Tensor> targets) {
    torch::jit::Stack arguments;
    for (const auto& value : arguments_) {
      arguments.push_back(map_tensors(value, [&](const Tensor& x) {
        return x.defined() && !memory_.knows(x) && x.is_cpu() ? snapshot(x) : x;
      }));
    }
    launch(
        memory_.uses(),
        [kernel = kernel_,
         arguments = std::move(arguments),
         targets = std::move(targets)] {
          auto stack = arguments;
          kernel.redispatchBoxed(
              c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
          auto target = targets.begin();
          for (const auto& value : stack) {
            map_tensors(value, [&](const Tensor& made) {
              if (target->defined()) {
                copy_result(*target, with_elements(made));
              }
              ++target;
              return made;
            });
          }
        });
  }

  torch::jit::Stack run_at_once() {
    counts().to_host += is_waited_for(op_) ? 1 : 0;
    ++counts().kernels;
    run_now(memory_.uses(), [&] {
      kernel_.redispatchBoxed(
          c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments_);
    });
    torch::jit::Stack results;
    for (const auto& value : arguments_) {
      results.push_back(map_tensors(
          value, [&](const Tensor& made) { return to_device(made); }));
    }
    write_back();
    return results;
  }

  Tensor to_device(const Tensor& made) {
    for (auto& x : written_) {
      if (made.is_same(x.host)) {
        return x.device;
      }
    }
    if (!on_device_ || !made.defined() || !made.is_cpu()) {
      return made;
    }
    const Tensor elements = with_elements(made);
    const bool is_new = !memory_.knows(elements);
    const Tensor result = memory_.on_device(elements);
    if (is_new) {
      fill(result, elements);
    }
    return result;
  }

  /// Written tensors that had no elements got their own memory.
  void write_back() {
    for (auto& [device, host, trial] : written_) {
      if (device.sizes() != host.sizes()) {
        device.resize_(host.sizes());
        fill(device, host);
      }
    }
  }

  static void fill(const Tensor& device, const Tensor& host) {
    Mirror memory(Mirror::Of::Memory);
    const Tensor target = memory.on_host(device);
    run_now(memory.uses(), [&] { copy_result(target, host); });
  }

  const c10::OperatorHandle& op_;
  const c10::OperatorHandle& kernel_;
  Mirror memory_{Mirror::Of::Memory};
  Mirror trial_{Mirror::Of::Zeros};
  torch::jit::Stack arguments_;
  torch::jit::Stack trial_arguments_;
  std::vector<Written> written_;
  bool on_device_ = false;
  bool host_tensor_ = false;
  bool writes_host_ = false;
  bool has_mask_ = false;
};

void run_as(
    const c10::OperatorHandle& op,
    const c10::OperatorHandle& kernel,
    torch::jit::Stack& stack) {
  auto results = Call(op, kernel, stack).run();
  torch::jit::drop(stack, kernel.schema().arguments().size());
  std::move(results.begin(), results.end(), std::back_inserter(stack));
}

void run_on_host(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  run_as(op, op, *stack);
}

// ---- memory -----------------------------------------------------------------

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size,
      allocator(),
      c10::DispatchKeySet(kKey),
      c10::dtype_or_default(dtype),
      format);
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size,
      stride,
      allocator(),
      c10::DispatchKeySet(kKey),
      c10::dtype_or_default(dtype));
}

const Tensor& resize(
    const Tensor& self,
    at::IntArrayRef size,
    std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  const auto bytes = (self.storage_offset() + self.numel()) *
      static_cast<int64_t>(self.element_size());
  if (bytes > static_cast<int64_t>(self.storage().nbytes())) {
    resize_storage(self.storage(), bytes);
  }
  return self;
}

Tensor& set_storage(
    Tensor& self,
    at::Storage source,
    c10::SymInt offset,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_offset(offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes()) /
      static_cast<int64_t>(self.element_size());
  return set_storage(self, std::move(source), 0, {size}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self,
      source.storage(),
      source.storage_offset(),
      c10::fromIntArrayRefSlow(source.sizes()),
      c10::fromIntArrayRefSlow(source.strides()));
}

/// Of this moment, unless the device reads pinned memory by itself.
Tensor source_of(const Tensor& x, bool non_blocking) {
  return non_blocking && x.is_pinned() ? x.detach() : x.clone();
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  at::assert_no_internal_overlap(dst);
  at::infer_size(dst.sizes(), self.sizes()); // raises where they don't fit
  const bool late =
      is_guarded(dst) || (non_blocking && dst.is_pinned()); // for the host
  counts().to_host += late ? 0 : 1;
  counts().to_device +=
      is_guarded(self) || (non_blocking && self.is_pinned()) ? 0 : 1;
  if (!is_guarded(self)) {
    auto& largest = counts().largest_to_device;
    largest = std::max<int64_t>(largest, self.numel());
  }
  Mirror memory(Mirror::Of::Memory);
  const Tensor source =
      is_guarded(self) ? memory.on_host(self) : source_of(self, non_blocking);
  const Tensor target =
      is_guarded(dst) ? memory.on_host(dst) : dst.detach(); // no Python object
  const auto copy = [source, target] { target.copy_(source); };
  if (late) {
    launch(memory.uses(), copy);
  } else {
    ++counts().kernels;
    run_now(memory.uses(), copy);
  }
  return dst;
}

at::Scalar local_scalar(const Tensor& self) {
  ++counts().to_host;
  ++counts().kernels;
  Mirror memory(Mirror::Of::Memory);
  const Tensor number = memory.on_host(self);
  at::Scalar result;
  run_now(memory.uses(), [&] { result = number.item(); });
  return result;
}

void record_stream(Tensor& self, at::Stream stream) {
  TORCH_CHECK(
      self.numel() == 0 || self.storage().data_ptr().get(),
      "guarded: record_stream of a tensor without memory");
  record(self.storage().data_ptr(), stream.id());
}

// ---- convolutions, which every device does by itself ------------------------

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  static const auto kernel = find("aten::convolution");
  const auto base = stack->size() - kernel.schema().arguments().size();
  TORCH_CHECK(
      is_guarded((*stack)[base].toTensor()) &&
          is_guarded((*stack)[base + 1].toTensor()),
      "convolution: expected all tensors to be on the same device, but found "
      "at least two devices, guarded:0 and cpu!");
  for (auto i = base; i < base + 2; ++i) { // cuDNN takes doubles row-major
    const auto x = (*stack)[i].toTensor();
    (*stack)[i] = x.scalar_type() == at::kDouble ? x.contiguous() : x;
  }
  run_as(op, kernel, *stack);
}

void convolution_backward(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  static const auto kernel = find("aten::convolution_backward");
  const auto first = stack->end() - op.schema().arguments().size();
  const std::vector<int64_t> bias_sizes{first->toTensor().size(1)};
  stack->insert(first + 3, c10::IValue(bias_sizes));
  run_as(op, kernel, *stack);
}

// ---- what CUDA lays row-major, whatever it is given
// --------------------------

void pad_row_major(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  auto& x = (*stack)[stack->size() - op.schema().arguments().size()];
  x = x.toTensor().contiguous();
  run_as(op, op, *stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  for (const char* name :
       {"reflection_pad2d",
        "reflection_pad3d",
        "replication_pad2d",
        "replication_pad3d"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&pad_row_major>());
  }
  m.impl(
      "convolution_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// It reads and writes what such views show, for the memory is the host's.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// A device has these of its own, not the formulas that PyTorch gives to others.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"native_group_norm", "native_layer_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

} // namespace
} // namespace guarded
