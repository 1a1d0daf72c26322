#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardtensor::detail {

/// A function of one element of each tensor, as text that PyTorch compiles for
/// the GPU when it is first called (at::cuda::CompileAndLaunchKernel).
struct CudaKernel {
  std::string name;
  std::string text;
};

/// Defines `kernel` and the same function for the host, from one text: a
/// template over T, the type of all tensors and scalars.
#define SHARDTENSOR_CUDA_KERNEL(kernel, name, ...) \
  __VA_ARGS__                                      \
  inline const CudaKernel kernel{#name, #__VA_ARGS__};

/// The same of a function that calls the one of `before`.
#define SHARDTENSOR_CUDA_KERNEL_AFTER(before, kernel, name, ...) \
  __VA_ARGS__                                                    \
  inline const CudaKernel kernel{#name, before.text + "\n" #__VA_ARGS__};

/// Whether run_cuda_kernel takes such tensors: on a GPU, where the library was
/// built with CUDA, and not while a compiler follows.
bool have_cuda_kernels(const at::Tensor& like);

/// What the function makes of the elements of tensors that broadcast; all have
/// one dtype, in which the result is, and at most 8 there are.
at::Tensor run_cuda_kernel(
    const CudaKernel& kernel,
    const std::vector<at::Tensor>& tensors,
    std::initializer_list<at::Scalar> scalars = {});

} // namespace shardtensor::detail
