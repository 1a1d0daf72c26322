#include "shardtensor/tensor/gradients/gradient_buckets.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/Event.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include "shardtensor/comm/primitives/all_reduce.h"
#include "shardtensor/comm/primitives/sum_in_place.h"
#include "shardtensor/comm/scope.h"
#include "shardtensor/tensor/shard_tensor.h"
#include "shardtensor/tensor/streams.h"

namespace shardtensor::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr const char* kScope = "gradients of parameters";

// Note [Terms of another stream]
// The engine runs a node on its forward's stream, and a callback on its
// caller's, which it has wait for the leaves' streams alone. A term set aside
// was given to no leaf: it says itself when it is there, and what reads it.
class Term {
 public:
  explicit Term(at::Tensor tensor) : tensor_(std::move(tensor)) {
    if (!tensor_.is_cpu() && !is_traced(tensor_)) {
      ready_ = std::make_unique<c10::Event>(tensor_.device().type());
      ready_->record(current_stream(tensor_));
    }
  }

  const at::Tensor& tensor() const {
    return tensor_;
  }

  /// For the current stream.
  const at::Tensor& take() const {
    if (ready_) {
      const auto reader = current_stream(tensor_);
      ready_->block(reader);
      tensor_.record_stream(reader);
    }
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  std::unique_ptr<c10::Event> ready_;
};

struct Entry {
  MeshPtr mesh;
  std::vector<int64_t> axes;
  NodePtr accumulate;
  Term term;
};

void give(const NodePtr& accumulate, at::Tensor total) {
  auto* node = static_cast<AccumulateGrad*>(accumulate.get());
  TORCH_CHECK(
      node->variable.numel() == 0 || node->variable.storage().nbytes() > 0,
      "a parameter of sizes ",
      node->variable.sizes(),
      " was freed before the end of backward; use the gradient policy "
      "'immediate'");
  variable_list grads;
  grads.push_back(std::move(total));
  node->apply(std::move(grads));
}

/// Terms of one mesh, axes, dtype and device that travel as one message.
class Bucket {
 public:
  explicit Bucket(Entry first) {
    add(std::move(first));
  }

  bool has_place_for(const Entry& entry) const {
    const auto& own = entries_[0].term.tensor();
    const auto& other = entry.term.tensor();
    return entry.mesh == entries_[0].mesh && entry.axes == entries_[0].axes &&
        other.scalar_type() == own.scalar_type() &&
        other.device() == own.device();
  }

  void add(Entry entry) {
    bytes_ += static_cast<int64_t>(entry.term.tensor().nbytes());
    entries_.push_back(std::move(entry));
  }

  int64_t bytes() const {
    return bytes_;
  }

  void start() {
    const CommScope scope(kScope);
    join();
    const auto& mesh = *entries_[0].mesh;
    const auto& axes = entries_[0].axes;
    if (is_traced(flat_)) {
      flat_ = all_reduce(flat_, Reduce::Sum, mesh, axes);
    } else {
      const bool real = !flat_.is_complex();
      sum_.emplace(real ? flat_ : at::view_as_real(flat_), mesh, axes);
    }
    entries_.clear(); // the terms' memory with it
  }

  void finish() {
    const CommScope scope(kScope);
    if (sum_) {
      sum_->wait();
    }
    if (!flat_.is_cpu() && !is_traced(flat_)) {
      flat_.record_stream(current_stream(flat_));
    }
    int64_t offset = 0;
    for (const auto& [accumulate, sizes, elements] : targets_) {
      auto total = flat_.narrow(0, offset, elements).view(sizes);
      offset += elements;
      if (targets_.size() == 1) {
        give(accumulate, std::move(total));
      } else {
        give(accumulate, total); // copies it: somebody else holds it
      }
    }
  }

 private:
  struct Target {
    NodePtr accumulate;
    std::vector<int64_t> sizes;
    int64_t elements;
  };

  /// The terms one behind the other, in memory that nobody else reads.
  void join() {
    std::vector<at::Tensor> flat;
    for (const auto& entry : entries_) {
      const auto& term = entry.term.take();
      flat.push_back(term.reshape({-1}));
      targets_.push_back({entry.accumulate, term.sizes().vec(), term.numel()});
    }
    flat_ = at::cat(flat);
  }

  std::vector<Entry> entries_; // until it starts
  int64_t bytes_ = 0;
  std::vector<Target> targets_;
  at::Tensor flat_;
  std::optional<SumInPlace> sum_;
};

/// What one call of backward owes, see Note [Gradient buckets].
class Owed {
 public:
  Owed() = default;
  Owed(const Owed&) = delete;
  Owed& operator=(const Owed&) = delete;
  /// After an error here: what is started is waited for as on the other ranks,
  /// in its order, for a wait may be what sends.
  ~Owed() {
    while (!started_.empty()) {
      started_.pop_front();
    }
  }

  void add(const CompletingNode& from, Entry entry) {
    if (!planned_) {
      plan();
    }
    if (Step* step = find(from)) {
      step->entries.push_back(std::move(entry));
    } else {
      unannounced_.push_back({&from, from.order(), true, {}});
      unannounced_.back().entries.push_back(std::move(entry));
    }
  }

  void note_that_terms_came(const CompletingNode& node) {
    if (!planned_) {
      before_plan_.push_back(&node);
      return;
    }
    if (Step* step = find(node)) {
      step->came = true;
    }
    while (next_ < steps_.size() && steps_[next_].came) {
      fill_from(steps_[next_++]);
    }
    if (next_ == steps_.size()) {
      start_all();
    }
  }

  void settle() {
    at::NoGradGuard no_grad;
    const auto later = [](const Step& a, const Step& b) {
      return a.order > b.order;
    };
    std::stable_sort(unannounced_.begin(), unannounced_.end(), later);
    while (next_ < steps_.size()) {
      fill_from(steps_[next_++]);
    }
    for (auto& step : unannounced_) {
      fill_from(step);
    }
    start_all();
    for (; !started_.empty(); started_.pop_front()) {
      started_.front().finish();
    }
  }

 private:
  /// A node, and what it has brought.
  struct Step {
    const Node* node;
    uint64_t order; // CompletingNode::order()
    bool came;
    std::vector<Entry> entries;
  };

  void plan() {
    planned_ = true;
    const auto* needed = torch::autograd::get_current_graph_task_exec_info();
    for (Node* node :
         *torch::autograd::get_current_graph_task_nodes_in_graph()) {
      const auto* completing = dynamic_cast<const CompletingNode*>(node);
      if (!completing || !completing->coalesces()) {
        continue;
      }
      if (needed && !needed->empty()) {
        const auto found = needed->find(node);
        if (found == needed->end() || !found->second.needed_) {
          continue;
        }
      }
      const auto begin = before_plan_.begin();
      const auto end = before_plan_.end();
      const bool came = std::find(begin, end, node) != end;
      steps_.push_back({node, completing->order(), came, {}});
    }
    std::sort(steps_.begin(), steps_.end(), [](auto& a, auto& b) {
      return a.order > b.order;
    });
  }

  /// The next one, nearly always.
  Step* find(const Node& node) {
    const auto found = std::find_if(
        steps_.begin() + static_cast<std::ptrdiff_t>(next_),
        steps_.end(),
        [&](const Step& step) { return step.node == &node; });
    return found == steps_.end() ? nullptr : &*found;
  }

  void fill_from(Step& step) {
    for (auto& entry : std::exchange(step.entries, {})) {
      const auto bucket =
          std::find_if(open_.begin(), open_.end(), [&](const Bucket& open) {
            return open.has_place_for(entry);
          });
      if (bucket == open_.end()) {
        open_.emplace_back(std::move(entry));
        start_full(open_.end() - 1);
      } else {
        bucket->add(std::move(entry));
        start_full(bucket);
      }
    }
  }

  void start_full(std::vector<Bucket>::iterator bucket) {
    if (bucket->bytes() >= gradient_bucket_bytes()) {
      start(std::move(*bucket));
      open_.erase(bucket);
    }
  }

  void start_all() {
    for (auto& bucket : std::exchange(open_, {})) {
      start(std::move(bucket));
    }
  }

  void start(Bucket bucket) {
    started_.push_back(std::move(bucket));
    started_.back().start();
  }

  bool planned_ = false;
  std::vector<const Node*> before_plan_;
  std::vector<Step> steps_; // in the order in which buckets take them
  size_t next_ = 0;
  std::vector<Step> unannounced_;
  std::vector<Bucket> open_;
  std::deque<Bucket> started_;
};

std::shared_ptr<Owed> owed_by_this_backward() {
  // The engine's callback owns the notes: when a backward raises, they go with
  // it.
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Owed>> by_task;
  const int task = torch::autograd::get_current_graph_task_id();
  const std::lock_guard<std::mutex> lock(mutex);
  if (auto existing = by_task[task].lock()) {
    return existing;
  }
  std::erase_if(
      by_task, [](const auto& item) { return item.second.expired(); });
  auto owed = std::make_shared<Owed>();
  by_task[task] = owed;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [owed] { owed->settle(); });
  return owed;
}

} // namespace

void sum_later(
    const CompletingNode& from,
    const NodePtr& accumulate,
    const at::Tensor& term,
    const MeshPtr& mesh,
    const std::vector<int64_t>& axes) {
  owed_by_this_backward()->add(from, {mesh, axes, accumulate, Term(term)});
}

void note_that_terms_came(const CompletingNode& node) {
  const bool in_engine = torch::autograd::get_current_graph_task_id() >= 0;
  if (node.coalesces() && in_engine && !at::GradMode::is_enabled()) {
    owed_by_this_backward()->note_that_terms_came(node);
  }
}

} // namespace shardtensor::detail
