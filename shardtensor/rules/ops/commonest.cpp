#include <ATen/core/Tensor.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/detach_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gelu_backward_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/leaky_relu_backward_ops.h>
#include <ATen/ops/leaky_relu_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/permute_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/reshape_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_backward_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_backward_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/slice_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/t_ops.h>
#include <ATen/ops/tanh_backward_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/threshold_backward_ops.h>
#include <ATen/ops/transpose_ops.h>
#include <ATen/ops/unsqueeze_ops.h>
#include <ATen/ops/where_ops.h>

#include "shardtensor/dispatch/unboxed_kernels.h"

// The operators that networks call most, see Note [Unboxed kernels].

namespace shardtensor::detail {
namespace {

namespace ops = at::_ops;

const RegisterUnboxed commonest{
    unboxed_pointwise<ops::add_Tensor>(),
    unboxed_pointwise<ops::sub_Tensor>(),
    unboxed_pointwise<ops::mul_Tensor>(),
    unboxed_pointwise<ops::div_Tensor>(),
    unboxed_pointwise<ops::neg>(),
    unboxed_pointwise<ops::abs>(),
    unboxed_pointwise<ops::exp>(),
    unboxed_pointwise<ops::log>(),
    unboxed_pointwise<ops::sqrt>(),
    unboxed_pointwise<ops::rsqrt>(),
    unboxed_pointwise<ops::sin>(),
    unboxed_pointwise<ops::cos>(),
    unboxed_pointwise<ops::pow_Tensor_Scalar>(),
    unboxed_pointwise<ops::where_self>(),
    unboxed_pointwise<ops::relu>(),
    unboxed_pointwise<ops::sigmoid>(),
    unboxed_pointwise<ops::tanh>(),
    unboxed_pointwise<ops::silu>(),
    unboxed_pointwise<ops::gelu>(),
    unboxed_pointwise<ops::leaky_relu>(),
    unboxed_pointwise<ops::threshold_backward>(),
    unboxed_pointwise<ops::sigmoid_backward>(),
    unboxed_pointwise<ops::tanh_backward>(),
    unboxed_pointwise<ops::silu_backward>(),
    unboxed_pointwise<ops::gelu_backward>(),
    unboxed_pointwise<ops::leaky_relu_backward>(),
    unboxed_above<ops::reshape>(),
    unboxed_above<ops::permute>(),
    unboxed_above<ops::transpose_int>(),
    unboxed_above<ops::t>(),
    unboxed_above<ops::unsqueeze>(),
    unboxed_above<ops::slice_Tensor>(),
    unboxed_above<ops::mm>(),
    unboxed_above<ops::addmm>(),
    unboxed_above<ops::detach>(),
};

} // namespace
} // namespace shardtensor::detail
