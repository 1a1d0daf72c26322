#include "shardtensor/dispatch/function_rule.h"

#include <array>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shardtensor/comm/scope.h"

namespace shardtensor {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

/// What at::_ops has of an operator; redispatch says that the rule stood aside.
struct Blend {
  using schema = std::string(
      const Tensor&,
      const OptionalTensor&,
      at::TensorList,
      c10::SymIntArrayRef,
      c10::SymInt);
  static constexpr const char* name = "aten::blend";
  static constexpr const char* overload_name = "";

  static std::string redispatch(
      c10::DispatchKeySet keys,
      const Tensor&,
      const OptionalTensor&,
      at::TensorList,
      c10::SymIntArrayRef,
      c10::SymInt) {
    EXPECT_FALSE(keys.has(kFunctionKey));
    return "aside of " + current_comm_scope();
  }
};

std::string blend_function(
    const Tensor&,
    const OptionalTensor&,
    at::TensorList,
    at::IntArrayRef sizes,
    int64_t number) {
  return c10::str(current_comm_scope(), ' ', sizes, ' ', number);
}

std::string blend_with_keys_function(
    c10::DispatchKeySet keys,
    const Tensor&,
    const OptionalTensor&,
    at::TensorList,
    at::IntArrayRef,
    int64_t) {
  return keys.has(kFunctionKey) ? "keys" : "no keys";
}

const c10::DispatchKeySet kKeys(kFunctionKey);

Tensor transformed() {
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::FuncTorchBatched),
      caffe2::TypeMeta::Make<float>(),
      at::kCPU);
}

std::string blend(
    const Tensor& self,
    const OptionalTensor& weight,
    at::TensorList others) {
  const std::array<c10::SymInt, 2> sizes{2, 3};
  return function_rule<Blend, blend_function>(
      kKeys, self, weight, others, sizes, 5);
}

TEST(FunctionRule, NamesTheOperatorAndTakesPlainNumbers) {
  const CommScope outer("outer");
  EXPECT_EQ(blend(at::ones(1), std::nullopt, {}), "aten::blend [2, 3] 5");
  EXPECT_EQ(current_comm_scope(), "outer");
}

TEST(FunctionRule, StandsAsideForTransformsAnywhereAmongTheArguments) {
  const CommScope outer("outer");
  const auto plain = at::ones(1);
  EXPECT_EQ(blend(transformed(), plain, {plain}), "aside of outer");
  EXPECT_EQ(blend(plain, transformed(), {plain}), "aside of outer");
  EXPECT_EQ(blend(plain, plain, {plain, transformed()}), "aside of outer");
  EXPECT_EQ(blend(plain, Tensor(), {Tensor()}), "aten::blend [2, 3] 5");
}

TEST(FunctionRule, HandsTheKeysOnToWhoAsksForThem) {
  const auto call = function_rule<Blend, blend_with_keys_function>;
  EXPECT_EQ(call(kKeys, at::ones(1), {}, {}, {}, 0), "keys");
}

} // namespace
} // namespace shardtensor
