#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/TensorBody.h>
#include <c10/util/FunctionRef.h>

#include "shardtensor/comm/group.h"

namespace shardtensor::detail {

/// What this rank is about to do.
struct Collective {
  std::string text; // the same on every rank
  std::string own; // what may differ, for an error's text
  Splits sends; // elements, or another number that the receiver has, too
  Splits receives;
};

/// The same on every machine, unlike std::hash.
uint64_t hash_of_text(const std::string& text);

/// x has no values, and a graph no place for messages that compare calls.
bool is_tracing(const at::Tensor& x);

/// Compares this call, on what kind of device x is and whether it requires
/// grad, with those of the other ranks, and what each rank sends with what its
/// peer expects. Where they differ every rank raises a ValueError that lists
/// all calls; where `prepare`, which looks at this rank's arguments, raises on
/// some ranks, every rank raises the first one's error. Nothing is compared
/// while a compiler traces x, or on one rank. Communication: one all-gather of
/// three integers, one more where something is wrong.
void agree_on_call(
    const Group& group,
    const at::Tensor& x,
    c10::function_ref<Collective()> prepare);

/// The same of a call whose arguments are known to be good, in check mode.
void check_same_call(
    const Group& group,
    const at::Tensor& x,
    const Collective& call);

} // namespace shardtensor::detail

namespace shardtensor {

/// For the Python package: as above, of a call whose text is the same on every
/// rank, or with what this rank raises, an error_kind of Python's.
void agree_on_call(
    const at::Tensor& x,
    const std::string& text,
    const std::string& error_kind,
    const std::string& error,
    const std::string& group);

/// For the Python package: the kind, "ValueError", and the text of an exception
/// that is Python's; none of others, which are RuntimeErrors with what they
/// say.
using ForeignError = std::optional<std::pair<std::string, std::string>>;
using ForeignErrorReader = ForeignError (*)(const std::exception_ptr& error);
void set_foreign_error_reader(ForeignErrorReader reader);

} // namespace shardtensor
