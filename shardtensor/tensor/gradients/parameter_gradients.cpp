#include "shardtensor/tensor/gradients/parameter_gradients.h"

#include <algorithm>
#include <atomic>

#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/comm/primitives/sum_in_place.h"
#include "shardtensor/layout/enum_words.h"
#include "shardtensor/tensor/gradients/completing_node.h"
#include "shardtensor/tensor/gradients/gradient_buckets.h"
#include "shardtensor/tensor/gradients/gradient_readers.h"
#include "shardtensor/tensor/gradients/tangent.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/threads/setting.h"

namespace shardtensor {

using namespace detail;
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

Setting<GradientPolicy> policy{"gradient_policy", GradientPolicy::Coalesced};
Setting<int64_t> bucket_bytes{
    "gradient_bucket_bytes",
    int64_t{25} << 20}; // as DDP's

constexpr EnumWords<GradientPolicy, 3> kGradientPolicies{
    "gradient policy",
    {{
        {GradientPolicy::Immediate, "immediate"},
        {GradientPolicy::Coalesced, "coalesced"},
        {GradientPolicy::Deferred, "deferred"},
    }}};

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
      if (members.size() > 1 && !is_traced(total) && !total.is_inference()) {
        // They lie in one memory, but each is written by itself.
        torch::autograd::impl::set_version_counter(
            totals[i], c10::VariableVersion(0));
      }
    }
  }
  return totals;
}

/// Backward of the identity that a weight passes on its way into local work.
struct SharedWeightsBackward : CompletingNode {
  SharedWeightsBackward(MeshPtr mesh, std::vector<int64_t> axes)
      : mesh_(std::move(mesh)), axes_(std::move(axes)) {}
  std::string name() const override {
    return "ShardTensorSharedWeightsBackward";
  }
  variable_list complete_from(variable_list&& grads) override {
    return complete(grads, mesh_, axes_);
  }
  MeshPtr mesh_;
  std::vector<int64_t> axes_;
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

/// Terms whose average over all ranks, the reader's, is the sum over `axes`.
std::vector<at::Tensor> leave_to_reader(
    const CompletingNode& from,
    const std::vector<at::Tensor>& terms,
    const Mesh& mesh,
    const std::vector<int64_t>& axes) {
  const auto ranks = mesh.ranks(axes);
  std::vector<at::Tensor> result(terms.size());
  for (size_t i = 0; i < terms.size(); ++i) {
    if (terms[i].defined()) {
      check_averages_over(from.next_edge(i).function.get(), mesh, axes);
      result[i] = at::mul(terms[i], at::Scalar(ranks));
    }
  }
  return result;
}

std::vector<at::Tensor> complete_by(
    GradientPolicy policy,
    const CompletingNode& node,
    const std::vector<at::Tensor>& terms,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) {
  if (axes.empty()) {
    return terms;
  }
  if (policy != GradientPolicy::Immediate) {
    learn_readers();
  }
  if (policy == GradientPolicy::Deferred) {
    return leave_to_reader(node, terms, *mesh, axes);
  }
  auto now = terms;
  if (policy == GradientPolicy::Coalesced) {
    for (size_t i = 0; i < terms.size(); ++i) {
      const auto& next = node.next_edge(i).function;
      if (terms[i].defined() && next && may_wait(next.get())) {
        sum_later(node, next, terms[i], mesh, axes);
        now[i] = at::Tensor();
      }
    }
  }
  return sum_terms(now, mesh, axes);
}

} // namespace

void set_gradient_policy(GradientPolicy value) {
  policy = value;
}

GradientPolicy gradient_policy() {
  return policy;
}

void set_gradient_bucket_bytes(int64_t bytes) {
  TORCH_CHECK_VALUE(
      bytes > 0,
      "gradient_bucket_bytes: expected a positive number of bytes, got ",
      bytes);
  bucket_bytes = bytes;
}

int64_t gradient_bucket_bytes() {
  return bucket_bytes;
}

const char* to_string(GradientPolicy policy) {
  return kGradientPolicies.word(policy);
}

GradientPolicy parse_gradient_policy(const std::string& name) {
  return kGradientPolicies.parse(name);
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

variable_list CompletingNode::apply(variable_list&& grads) {
  auto result = complete_from(std::move(grads));
  note_that_terms_came(*this);
  return result;
}

std::vector<at::Tensor> CompletingNode::complete(
    const std::vector<at::Tensor>& terms,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) const {
  return complete_by(policy_, *this, terms, mesh, axes);
}

uint64_t CompletingNode::next_order() {
  // Not sequence_nr(): each thread counts its own.
  static std::atomic<uint64_t> next{0};
  return next++;
}

} // namespace shardtensor
