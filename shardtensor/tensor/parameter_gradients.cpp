#include "shardtensor/tensor/parameter_gradients.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "shardtensor/comm/all_reduce.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/comm/sum_in_place.h"
#include "shardtensor/tensor/recorded_policy.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/tangent.h"

namespace shardtensor {

using namespace detail;
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

std::atomic<GradientPolicy> policy{GradientPolicy::Coalesced};

/// The sum over `axes` of flat tensors, one behind the other.
at::Tensor sum_flat(
    const std::vector<at::Tensor>& flat,
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  if (flat.size() == 1) {
    return all_reduce(flat[0], Reduce::Sum, mesh, axes);
  }
  const auto joined = at::cat(flat);
  if (is_traced(joined) || !joined.is_floating_point()) {
    return all_reduce(joined, Reduce::Sum, mesh, axes);
  }
  sum_in_place(joined, mesh, axes);
  return joined;
}

/// All tensors of one dtype and device, summed over `axes` in one message.
std::vector<at::Tensor> sum_together(
    const std::vector<at::Tensor>& terms,
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  std::vector<at::Tensor> totals(terms.size());
  std::vector<bool> done(terms.size());
  for (size_t first = 0; first < terms.size(); ++first) {
    if (done[first] || !terms[first].defined()) {
      continue;
    }
    std::vector<size_t> members;
    std::vector<at::Tensor> flat;
    for (size_t i = first; i < terms.size(); ++i) {
      if (!done[i] && terms[i].defined() &&
          terms[i].scalar_type() == terms[first].scalar_type() &&
          terms[i].device() == terms[first].device()) {
        members.push_back(i);
        flat.push_back(terms[i].reshape({-1}));
        done[i] = true;
      }
    }
    const auto total = sum_flat(flat, mesh, axes);
    int64_t offset = 0;
    for (const size_t i : members) {
      totals[i] =
          total.narrow(0, offset, terms[i].numel()).view(terms[i].sizes());
      offset += terms[i].numel();
    }
  }
  return totals;
}

std::vector<at::Tensor> sum_terms(
    const std::vector<at::Tensor>& terms,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes);

/// Backward of the identity that a weight passes on its way into local work.
struct SharedWeightsBackward : Node {
  SharedWeightsBackward(MeshPtr mesh, std::vector<int64_t> axes)
      : mesh_(std::move(mesh)), axes_(std::move(axes)) {}
  std::string name() const override {
    return "ShardTensorSharedWeightsBackward";
  }
  variable_list apply(variable_list&& grads) override {
    return complete_gradients(policy_, grads, mesh_, axes_);
  }
  MeshPtr mesh_;
  std::vector<int64_t> axes_;
  GradientPolicy policy_ = gradient_policy();
};

/// Backward of a sum of terms into a plain, complete gradient: each rank's
/// term has the whole gradient of the sum.
struct SumTermsBackward : Node {
  SumTermsBackward(MeshPtr mesh, std::vector<int64_t> axes)
      : mesh_(std::move(mesh)), axes_(std::move(axes)) {}
  std::string name() const override {
    return "ShardTensorSumTermsBackward";
  }
  variable_list apply(variable_list&& grads) override {
    return shared_weights(grads, mesh_, axes_);
  }
  MeshPtr mesh_;
  std::vector<int64_t> axes_;
};

/// Gives `outputs` the history "made from `inputs` by NodeType".
template <class NodeType>
void record_all(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) {
  if (!std::any_of(inputs.begin(), inputs.end(), needs_node)) {
    return;
  }
  auto node = make_node<NodeType>(mesh, axes);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  for (const auto& output : outputs) {
    if (output.defined()) {
      torch::autograd::set_history(output, node);
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
}

std::vector<at::Tensor> sum_terms(
    const std::vector<at::Tensor>& terms,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) {
  std::vector<at::Tensor> totals;
  {
    at::NoGradGuard no_grad;
    totals = sum_together(terms, *mesh, axes);
    for (auto& total : totals) {
      if (total.defined()) {
        total = total.detach();
      }
    }
  }
  record_all<SumTermsBackward>(totals, terms, mesh, axes);
  return totals;
}

// Note [Coalesced gradients]
// A term may wait for the end of backward when the only thing that will ever
// see the gradient is the parameter's own AccumulateGrad node, which we then
// call ourselves. Everything else that could look earlier is detectable.
bool may_wait(Node* next) {
  auto* accumulate = dynamic_cast<AccumulateGrad*>(next);
  if (!accumulate || at::GradMode::is_enabled()) {
    return false;
  }
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info && !info->empty()) {
    auto found = info->find(next);
    if (found == info->end() || !found->second.needed_ ||
        found->second.captures_) {
      return false; // torch.autograd.grad captures it
    }
  }
  return accumulate->tensor_pre_hooks().empty() &&
      accumulate->pre_hooks().empty() && accumulate->post_hooks().empty() &&
      !accumulate->tensor_post_acc_grad_hooks();
}

// Note [Terms of another stream]
// The engine runs a node on its forward's stream, and a callback on its
// caller's, which it has wait for the leaves' streams alone. A term set aside
// was given to no leaf: it says itself when it is there, and what reads it.
class Term {
 public:
  explicit Term(at::Tensor tensor) : tensor_(std::move(tensor)) {
    if (!tensor_.is_cpu()) {
      ready_ = std::make_unique<c10::Event>(tensor_.device().type());
      ready_->record(stream());
    }
  }

  /// For the current stream.
  const at::Tensor& take() const {
    if (ready_) {
      const auto reader = stream();
      ready_->block(reader);
      tensor_.record_stream(reader);
    }
    return tensor_;
  }

 private:
  c10::Stream stream() const {
    return c10::impl::VirtualGuardImpl(tensor_.device().type())
        .getStream(tensor_.device());
  }

  at::Tensor tensor_;
  std::unique_ptr<c10::Event> ready_;
};

/// What one call of backward still owes.
struct Pending {
  struct Entry {
    NodePtr accumulate;
    Term term;
    uint64_t order; // of the forward, the same on all ranks
  };
  using Key = std::pair<MeshPtr, std::vector<int64_t>>;
  std::vector<std::pair<Key, std::vector<Entry>>> groups;

  void add(const Key& key, Entry entry) {
    auto found = std::find_if(groups.begin(), groups.end(), [&](auto& group) {
      return group.first == key;
    });
    if (found == groups.end()) {
      groups.emplace_back(key, std::vector<Entry>());
      found = groups.end() - 1;
    }
    found->second.push_back(std::move(entry));
  }

  void settle() {
    at::NoGradGuard no_grad;
    CommScope scope("gradients of parameters");
    std::stable_sort(groups.begin(), groups.end(), [](auto& a, auto& b) {
      return a.first.second < b.first.second;
    });
    for (auto& [key, entries] : groups) {
      settle_group(*key.first, key.second, entries);
    }
  }

 private:
  static void settle_group(
      const Mesh& mesh,
      const std::vector<int64_t>& axes,
      std::vector<Entry>& entries) {
    std::stable_sort(
        entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
          return a.order > b.order;
        });
    std::vector<at::Tensor> terms;
    for (const auto& entry : entries) {
      terms.push_back(entry.term.take());
    }
    const auto totals = sum_together(terms, mesh, axes);
    for (size_t i = 0; i < entries.size(); ++i) {
      auto* node = static_cast<AccumulateGrad*>(entries[i].accumulate.get());
      TORCH_CHECK(
          node->variable.numel() == 0 || node->variable.storage().nbytes() > 0,
          "a parameter of sizes ",
          node->variable.sizes(),
          " was freed before the end of backward, as FSDP does; use the "
          "gradient policy 'immediate' or 'deferred'");
      node->apply({totals[i]});
    }
  }
};

std::shared_ptr<Pending> pending_of_this_backward() {
  // The engine's callback owns the notes: when a backward raises, they go with
  // it.
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Pending>> by_task;
  const int task = torch::autograd::get_current_graph_task_id();
  std::lock_guard<std::mutex> lock(mutex);
  if (auto existing = by_task[task].lock()) {
    return existing;
  }
  std::erase_if(
      by_task, [](const auto& item) { return item.second.expired(); });
  auto pending = std::make_shared<Pending>();
  by_task[task] = pending;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [pending] { pending->settle(); });
  return pending;
}

} // namespace

void set_gradient_policy(GradientPolicy value) {
  policy = value;
}

GradientPolicy gradient_policy() {
  return policy;
}

const char* to_string(GradientPolicy value) {
  switch (value) {
    case GradientPolicy::Immediate:
      return "immediate";
    case GradientPolicy::Coalesced:
      return "coalesced";
    case GradientPolicy::Deferred:
      return "deferred";
  }
  return "unknown";
}

GradientPolicy parse_gradient_policy(const std::string& name) {
  for (auto value :
       {GradientPolicy::Immediate,
        GradientPolicy::Coalesced,
        GradientPolicy::Deferred}) {
    if (name == to_string(value)) {
      return value;
    }
  }
  TORCH_CHECK_VALUE(
      false,
      "gradient policy: expected 'immediate', 'coalesced' or 'deferred', got '",
      name,
      "'");
}

std::vector<at::Tensor> shared_weights(
    const std::vector<at::Tensor>& weights,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) {
  std::vector<at::Tensor> plain;
  for (const auto& weight : weights) {
    if (!is_shard_tensor(weight)) {
      if (weight.defined()) {
        check_equal_on_all_ranks(weight, *mesh);
      }
      plain.push_back(weight);
      continue;
    }
    const auto whole = redistribute(weight, replicated(spec(weight)));
    auto grad_placements = spec(whole)->placements();
    for (const int64_t axis : axes) {
      grad_placements[axis] = Placement::partial();
    }
    plain.push_back(to_local(
        whole, make_spec(mesh, spec(whole)->sizes(), grad_placements)));
  }
  if (axes.empty() || !std::any_of(weights.begin(), weights.end(), [](auto& w) {
        return needs_node(w) && !is_shard_tensor(w);
      })) {
    return plain;
  }
  std::vector<at::Tensor> inputs(plain.size());
  std::vector<at::Tensor> outputs(plain.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    if (needs_node(weights[i]) && !is_shard_tensor(weights[i])) {
      check_no_tangent("a parameter that requires grad", plain[i]);
      inputs[i] = plain[i];
      outputs[i] = plain[i].detach();
    }
  }
  record_all<SharedWeightsBackward>(outputs, inputs, mesh, axes);
  for (size_t i = 0; i < plain.size(); ++i) {
    if (outputs[i].defined()) {
      plain[i] = outputs[i];
    }
  }
  return plain;
}

std::vector<at::Tensor> complete_gradients(
    const std::vector<at::Tensor>& terms,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) {
  return complete_gradients(gradient_policy(), terms, mesh, axes);
}

std::vector<at::Tensor> detail::complete_gradients(
    GradientPolicy policy,
    const std::vector<at::Tensor>& terms,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) {
  if (axes.empty()) {
    return terms;
  }
  std::vector<at::Tensor> result(terms.size());
  if (policy == GradientPolicy::Deferred) {
    int64_t ranks = 1;
    for (const int64_t axis : axes) {
      ranks *= mesh->ranks(axis);
    }
    for (size_t i = 0; i < terms.size(); ++i) {
      result[i] =
          terms[i].defined() ? at::mul(terms[i], at::Scalar(ranks)) : terms[i];
    }
    return result;
  }
  auto now = terms;
  if (policy == GradientPolicy::Coalesced) {
    const auto node = torch::autograd::get_current_node();
    for (size_t i = 0; i < terms.size(); ++i) {
      const auto& next = node->next_edge(i).function;
      if (terms[i].defined() && next && may_wait(next.get())) {
        pending_of_this_backward()->add(
            {mesh, axes}, {next, Term(terms[i]), node->sequence_nr()});
        now[i] = at::Tensor();
      }
    }
  }
  return sum_terms(now, mesh, axes);
}

} // namespace shardtensor
