#include "shardtensor/tensor/cuda_kernel.h"

// Built where libtorch has no CUDA; see cuda_kernel.cpp.

namespace shardtensor::detail {

bool have_cuda_kernels(const at::Tensor&) {
  return false;
}

at::Tensor run_cuda_kernel(
    const CudaKernel& kernel,
    const std::vector<at::Tensor>&,
    std::initializer_list<at::Scalar>) {
  TORCH_INTERNAL_ASSERT(false, kernel.name, ": built without CUDA");
}

} // namespace shardtensor::detail
