#include "tests/rules/norm/batch_norm_kernels.h"

#include <torch/library.h>

// As CUDA does, the guarded device has kernels for a batch norm over processes.

namespace guarded {

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  batch_norm_kernels::define(m);
}

} // namespace guarded
