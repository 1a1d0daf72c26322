// Every operator that the library adds to PyTorch. Kernels are registered in
// the files that define them.
#include <torch/library.h>

TORCH_LIBRARY(shardtensor, m) {
  // Moves boxes between ranks. `code`: see comm/exchange_code.h.
  m.def(
      "exchange(Tensor x, int[] code, str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // `reduce`: sum, avg, product, max or min.
  m.def(
      "all_reduce(Tensor x, str reduce, str group) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}
