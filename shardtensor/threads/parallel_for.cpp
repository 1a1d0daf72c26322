#include "shardtensor/threads/parallel_for.h"

#include <algorithm>

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

namespace shardtensor::detail {

void parallel_for(
    int64_t count,
    int64_t grain,
    c10::function_ref<void(int64_t begin, int64_t end)> body) {
  if (count <= grain || at::get_num_threads() == 1 ||
      at::in_parallel_region()) {
    if (count > 0) {
      body(0, count);
    }
    return;
  }
  // A byte for each task: the loop over them is PyTorch's.
  const int64_t tasks = (count + grain - 1) / grain;
  const at::Tensor bytes = at::detail::empty_cpu({tasks}, at::kByte);
  const auto* const first = static_cast<const char*>(bytes.const_data_ptr());
  const auto run =
      [&](char** data, const int64_t*, int64_t columns, int64_t rows) {
        TORCH_INTERNAL_ASSERT(rows == 1);
        const int64_t task = data[0] - first;
        body(task * grain, std::min((task + columns) * grain, count));
      };
  at::TensorIteratorConfig()
      .set_check_mem_overlap(false)
      .resize_outputs(false)
      .check_all_same_dtype(false)
      .add_output(bytes)
      .build()
      .for_each(run, 1);
}

} // namespace shardtensor::detail
