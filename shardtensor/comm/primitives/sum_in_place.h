#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardtensor/comm/group.h"
#include "shardtensor/layout/mesh.h"

namespace shardtensor::detail {

/// The contiguous floating-point tensor x, which nobody else reads, becomes its
/// sum over mesh axes, without the copy that all_reduce makes. Not recorded.
/// Communication: that of all_reduce.
void sum_in_place(
    const at::Tensor& x,
    const Mesh& mesh,
    const std::vector<int64_t>& axes);

/// The same beside other work, from the constructor to wait(): over the first
/// axis, or all of the mesh's at once; the other axes follow in wait(). One
/// that goes without a wait waits for what has started, see Started.
class SumInPlace {
 public:
  SumInPlace(
      const at::Tensor& x,
      const Mesh& mesh,
      const std::vector<int64_t>& axes);
  void wait();

 private:
  at::Tensor x_;
  std::vector<std::string> later_; // groups
  Started started_;
};

} // namespace shardtensor::detail
