#pragma once

#include <optional>
#include <string>

#include <ATen/core/TensorBody.h>
#include <c10/util/FunctionRef.h>

namespace shardtensor::detail {

/// An error of one rank, as the others can raise it, too.
struct KnownError {
  enum class Kind { None, Value, Index, Type, OfMatrix, Other };
  Kind kind = Kind::None;
  std::string text; // its first 512 bytes travel
};

/// What `run` raises, if it does.
std::optional<KnownError> error_of(c10::function_ref<void()> run);

/// Of an error that Python calls so, "ValueError".
KnownError::Kind kind_named(const std::string& name);

[[noreturn]] void raise(const KnownError& error);

/// The error as bytes on the host, as many for each; all zero for none.
at::Tensor bytes_of(const std::optional<KnownError>& error);
KnownError error_from(const at::Tensor& bytes);

} // namespace shardtensor::detail
