#include "shardtensor/collectives/shared_parameters.h"

#include <mutex>
#include <unordered_map>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include "shardtensor/comm/primitives/all_reduce.h"

namespace shardtensor {

namespace {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Shared {
  Weak parameter; // keeps the address from being used again
  unsigned hook;
};

/// Of the process; the hooks of parameters that are shared.
class SharedParameters {
 public:
  bool has(const at::Tensor& parameter) const {
    return shared_.contains(parameter.unsafeGetTensorImpl());
  }
  void add(const at::Tensor& parameter, unsigned hook) {
    std::erase_if(shared_, [](const auto& item) {
      return item.second.parameter.expired();
    });
    shared_.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        Shared{Weak(parameter.getIntrusivePtr()), hook});
  }
  /// Of one that there is.
  void remove(const at::Tensor& parameter) {
    const auto found = shared_.find(parameter.unsafeGetTensorImpl());
    parameter.remove_hook(found->second.hook);
    shared_.erase(found);
  }

  static SharedParameters& all() {
    static auto* parameters = new SharedParameters; // outlives all tensors
    return *parameters;
  }
  std::mutex mutex;

 private:
  std::unordered_map<const c10::TensorImpl*, Shared> shared_;
};

/// Raises with the names of the parameters that `shared` is true of.
void check_none(
    const char* op,
    const char* what,
    const NamedParameters& parameters,
    bool shared) {
  std::vector<std::string> names;
  for (const auto& [name, parameter] : parameters) {
    if (SharedParameters::all().has(parameter) == shared) {
      names.push_back(name);
    }
  }
  TORCH_CHECK(names.empty(), op, ": ", what, ": ", names);
}

NamedParameters parameters_of(const torch::nn::Module& module, bool recurse) {
  NamedParameters result;
  for (const auto& item : module.named_parameters(recurse)) {
    result.emplace_back(item.key(), item.value());
  }
  return result;
}

} // namespace

void share_gradients(
    const NamedParameters& parameters,
    const std::string& group,
    bool use_fp32_reduction) {
  auto& all = SharedParameters::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  check_none("mark_module_as_shared", "already shared", parameters, true);
  for (const auto& [name, parameter] : parameters) {
    if (all.has(parameter)) {
      continue; // under another name
    }
    const bool wide = use_fp32_reduction &&
        at::isReducedFloatingType(parameter.scalar_type());
    all.add(parameter, parameter.register_hook([=](const at::Tensor& grad) {
      const auto term = wide ? grad.to(at::kFloat) : grad;
      return all_reduce(term, Reduce::Sum, group).to(grad.scalar_type());
    }));
  }
}

void unshare_gradients(const NamedParameters& parameters) {
  auto& all = SharedParameters::all();
  const std::lock_guard<std::mutex> lock(all.mutex);
  check_none("unmark_module_as_shared", "not shared", parameters, false);
  for (const auto& [name, parameter] : parameters) {
    if (all.has(parameter)) {
      all.remove(parameter);
    }
  }
}

void mark_module_as_shared(
    const torch::nn::Module& module,
    const std::string& group,
    bool recurse,
    bool use_fp32_reduction) {
  share_gradients(parameters_of(module, recurse), group, use_fp32_reduction);
}

void unmark_module_as_shared(const torch::nn::Module& module, bool recurse) {
  unshare_gradients(parameters_of(module, recurse));
}

} // namespace shardtensor
