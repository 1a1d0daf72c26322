#include <algorithm>
#include <string>
#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include "memory.h"

// Kernels of the guarded device: the CPU's, on the same memory. What is CUDA's
// way, and not the CPU's, is an error here: operands on two devices.

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
  static const std::unordered_set<std::string> names{
      "aten::equal",
      "aten::nonzero",
      "aten::masked_select",
      "aten::_unique2",
      "aten::unique_dim",
      "aten::unique_consecutive"};
  return names.count(op.schema().name()) > 0;
}

/// Its argument list of one call, seen from the host.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), stack_(stack) {
    const auto& schema = op.schema().arguments();
    const auto base = stack.size() - schema.size();
    for (size_t i = 0; i < schema.size(); ++i) {
      const auto* alias = schema[i].alias_info();
      written_ = alias && alias->isWrite();
      auto& value = stack[base + i];
      if (value.isDevice() && value.toDevice().type() == kDevice) {
        on_device_ = true;
        value = c10::Device(c10::kCPU);
      } else {
        value = to_host(value);
      }
    }
    check_devices();
  }

  Tensor to_device(const Tensor& made) {
    for (auto& [device, host] : written_tensors_) {
      if (made.is_same(host)) {
        return device;
      }
    }
    if (!on_device_ || !made.defined() || !made.is_cpu()) {
      return made;
    }
    // A tensor of zeros without memory is one by its dispatch key.
    return kernel_.on_device(
        made._is_zerotensor() ? at::zeros(made.sizes(), made.options()) : made);
  }

  /// Written tensors that had no elements got their own memory.
  void write_back() {
    for (auto& [device, host] : written_tensors_) {
      if (device.sizes() != host.sizes()) {
        device.resize_(host.sizes());
        kernel_.on_host(device).copy_(host);
      }
    }
  }

 private:
  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor()) {
      return to_host(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorList()) {
        list.push_back(to_host(x));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor> x : value.toOptionalTensorList()) {
        list.push_back(x ? std::optional(to_host(*x)) : std::nullopt);
      }
      return list;
    }
    return value;
  }

  Tensor to_host(const Tensor& x) {
    if (!is_guarded(x)) {
      host_tensor_ = host_tensor_ ||
          (x.defined() && x.is_cpu() && (x.dim() > 0 || written_));
      return x;
    }
    on_device_ = true;
    const bool resizes = written_ && x.storage().nbytes() == 0;
    const Tensor host = resizes
        ? at::empty(x.sizes(), x.options().device(c10::kCPU))
        : kernel_.on_host(x);
    if (written_) {
      written_tensors_.emplace_back(x, host);
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

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  Kernel kernel_;
  std::vector<std::pair<Tensor, Tensor>> written_tensors_;
  bool written_ = false;
  bool on_device_ = false;
  bool host_tensor_ = false;
};

void run_on_host(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  counts().to_host += is_waited_for(op) ? 1 : 0;
  Arguments arguments(op, *stack);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  arguments.write_back();
  const auto results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = arguments.to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorList()) {
        list.push_back(arguments.to_device(x));
      }
      value = std::move(list);
    }
  }
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
  auto storage = self.storage();
  if (bytes > static_cast<int64_t>(storage.nbytes())) {
    auto memory = allocator()->allocate(bytes); // what it held is lost
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
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

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  counts().to_host += is_guarded(dst) ? 0 : 1;
  counts().to_device +=
      is_guarded(self) || (non_blocking && self.is_pinned()) ? 0 : 1;
  if (!is_guarded(self)) {
    auto& largest = counts().largest_to_device;
    largest = std::max<int64_t>(largest, self.numel());
  }
  Kernel kernel;
  kernel.on_host(dst).copy_(kernel.on_host(self));
  return dst;
}

at::Scalar local_scalar(const Tensor& self) {
  ++counts().to_host;
  Kernel kernel;
  return kernel.on_host(self).item();
}

void record_stream(Tensor& self, at::Stream) {
  TORCH_CHECK(
      self.numel() == 0 || self.storage().data_ptr().get(),
      "guarded: record_stream of a tensor without memory");
  ++counts().recorded_streams;
}

// ---- convolutions, which every device does by itself ------------------------

Tensor convolution(
    const Tensor& x,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups) {
  TORCH_CHECK(
      is_guarded(x) && is_guarded(weight),
      "convolution: expected all tensors to be on the same device, but found "
      "at least two devices, guarded:0 and cpu!");
  Kernel kernel;
  return kernel.on_device(
      at::convolution(
          kernel.on_host(x),
          kernel.on_host(weight),
          bias && bias->defined() ? std::optional(kernel.on_host(*bias))
                                  : std::nullopt,
          stride,
          padding,
          dilation,
          transposed,
          output_padding,
          groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad,
    const Tensor& x,
    const Tensor& weight,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    at::IntArrayRef dilation,
    bool transposed,
    at::IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  Kernel kernel;
  const std::vector<int64_t> bias_sizes{grad.size(1)};
  const auto [dx, dweight, dbias] = at::convolution_backward(
      kernel.on_host(grad),
      kernel.on_host(x),
      kernel.on_host(weight),
      at::OptionalIntArrayRef(bias_sizes),
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups,
      wanted);
  const auto moved = [&](const Tensor& made) {
    return made.defined() ? kernel.on_device(made) : made;
  };
  return {moved(dx), moved(dweight), moved(dbias)};
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
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
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
