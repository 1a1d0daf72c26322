#include "shardtensor/tensor/cuda_kernel.h"

#include <ATen/cuda/jiterator.h>
#include <c10/core/DeviceGuard.h>

#include "shardtensor/tensor/shard_tensor_impl.h"

// Built where libtorch has CUDA; see without_cuda_kernel.cpp.

namespace shardtensor::detail {

bool have_cuda_kernels(const at::Tensor& like) {
  return like.is_cuda() && !is_traced(like);
}

at::Tensor run_cuda_kernel(
    const CudaKernel& kernel,
    const std::vector<at::Tensor>& tensors,
    std::initializer_list<at::Scalar> scalars) {
  const c10::DeviceGuard guard(tensors.front().device());
  return at::cuda::CompileAndLaunchKernel(
      kernel.text,
      kernel.name,
      /*num_outputs=*/1,
      c10::SmallVector<at::Tensor>(tensors.begin(), tensors.end()),
      c10::SmallVector<at::Scalar>(scalars.begin(), scalars.end()),
      /*return_by_ref=*/false)[0];
}

} // namespace shardtensor::detail
