#include "shardtensor/comm/known_error.h"

#include <algorithm>
#include <atomic>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "shardtensor/comm/check.h"

namespace shardtensor::detail {
namespace {

using Kind = KnownError::Kind;

constexpr int64_t kTextBytes = 512;

/// Its own class: a LinAlgError, say, is an Error as well.
Kind kind_of(const c10::Error& error) {
  const auto is = [&](auto* like) {
    return dynamic_cast<decltype(like)>(&error) != nullptr;
  };
  return is(static_cast<const c10::ValueError*>(nullptr)) ? Kind::Value
      : is(static_cast<const c10::IndexError*>(nullptr))  ? Kind::Index
      : is(static_cast<const c10::TypeError*>(nullptr))   ? Kind::Type
      : is(static_cast<const c10::LinAlgError*>(nullptr)) ? Kind::OfMatrix
                                                          : Kind::Other;
}

/// How much of a text travels: whole characters of UTF-8.
int64_t bytes_that_travel(const std::string& text) {
  auto length = static_cast<int64_t>(text.size());
  if (length <= kTextBytes) {
    return length;
  }
  const auto continues = [&](int64_t at) { return (text[at] & 0xc0) == 0x80; };
  for (length = kTextBytes; length > 0 && continues(length); --length) {
  }
  return length;
}

std::atomic<ForeignErrorReader> foreign_error_reader{nullptr};

ForeignError foreign_error(const std::exception_ptr& error) {
  const auto reader = foreign_error_reader.load();
  return reader ? reader(error) : std::nullopt;
}

} // namespace

Kind kind_named(const std::string& name) {
  return name == "ValueError" ? Kind::Value
      : name == "IndexError"  ? Kind::Index
      : name == "TypeError"   ? Kind::Type
                              : Kind::Other;
}

std::optional<KnownError> error_of(c10::function_ref<void()> run) {
  try {
    run();
  } catch (const c10::Error& error) {
    return KnownError{kind_of(error), error.what_without_backtrace()};
  } catch (const std::exception& error) {
    const auto foreign = foreign_error(std::current_exception());
    return foreign ? KnownError{kind_named(foreign->first), foreign->second}
                   : KnownError{Kind::Other, error.what()};
  }
  return std::nullopt;
}

void raise(const KnownError& error) {
  TORCH_CHECK_VALUE(error.kind != Kind::Value, error.text);
  TORCH_CHECK_INDEX(error.kind != Kind::Index, error.text);
  TORCH_CHECK_TYPE(error.kind != Kind::Type, error.text);
  TORCH_CHECK_LINALG(error.kind != Kind::OfMatrix, error.text);
  C10_THROW_ERROR(Error, error.text);
}

at::Tensor bytes_of(const std::optional<KnownError>& error) {
  const auto bytes = at::zeros({kTextBytes + 1}, at::kByte);
  if (error) {
    auto* const own = bytes.mutable_data_ptr<uint8_t>();
    own[0] = static_cast<uint8_t>(error->kind);
    std::copy_n(error->text.begin(), bytes_that_travel(error->text), own + 1);
  }
  return bytes;
}

KnownError error_from(const at::Tensor& bytes) {
  const auto host = bytes.to(at::kCPU);
  const auto* const begin = host.const_data_ptr<uint8_t>();
  const auto* const end = begin + host.numel();
  return {static_cast<Kind>(*begin), {begin + 1, std::find(begin + 1, end, 0)}};
}

} // namespace shardtensor::detail

void shardtensor::set_foreign_error_reader(ForeignErrorReader reader) {
  detail::foreign_error_reader = reader;
}
