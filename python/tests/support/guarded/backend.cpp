#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "mirror.h"
#include "queue.h"

// Messages between guarded tensors: staged on the host, gloo's. As over NCCL a
// call is done when it is waited for, outputs are poison until then, and what
// nothing runs beside returns no work. What came is there for the stream that
// waited. Or as gloo does with CUDA tensors: its
// collectives stage them, and its messages take their addresses for the host's.

namespace guarded {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Of this moment: what is under way on the current stream comes later.
Tensor read(const Tensor& x) {
  Mirror memory(Mirror::Of::Memory);
  const Tensor host = memory.on_host(x);
  const std::lock_guard lock(device_mutex());
  const Open open(memory.uses());
  return host.clone(at::MemoryFormat::Contiguous);
}

/// On the current stream, which has waited.
void write(const Tensor& x, const Tensor& staged) {
  Mirror memory(Mirror::Of::Memory);
  const Tensor host = memory.on_host(x);
  launch(memory.uses(), [=] { host.copy_(staged); });
}

void poison(const Tensor& x) {
  Mirror memory(Mirror::Of::Memory);
  const Tensor host = memory.on_host(x);
  launch(memory.uses(), [=] { host.view({-1}).view(at::kByte).fill_(0xCD); });
}

class LateWork : public c10d::Work {
 public:
  LateWork(Tensors results, std::function<void()> finish)
      : results_(std::move(results)), finish_(std::move(finish)) {}
  bool wait(std::chrono::milliseconds) override {
    if (finish_) {
      std::exchange(finish_, nullptr)();
    }
    return true;
  }
  bool isCompleted() override {
    return !finish_;
  }
  void synchronize() override {
    wait(std::chrono::milliseconds(0));
  }
  /// Who asks for it waits: a future can't be late by itself.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    {
      // Python asks with its lock, which gloo's thread takes to free a tensor.
      std::optional<pybind11::gil_scoped_release> released;
      if (PyGILState_Check()) {
        released.emplace();
      }
      synchronize();
    }
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(),
        std::vector<c10::Device>{c10::Device(kDevice, 0)});
    future->markCompleted(results_);
    return future;
  }

 private:
  Tensors results_;
  std::function<void()> finish_;
};

class StagedBackend : public c10d::Backend {
 public:
  StagedBackend(BackendPtr gloo, bool as_gloo)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        as_gloo_(as_gloo) {}

  const std::string getBackendName() const override {
    return as_gloo_ ? "gloo" : "guarded";
  }
  bool supportsCoalescing() const override {
    return !as_gloo_;
  }

  WorkPtr alltoall_base(
      Tensor& out,
      Tensor& in,
      std::vector<int64_t>& out_splits,
      std::vector<int64_t>& in_splits,
      const c10d::AllToAllOptions& options) override {
    poison(out);
    return start(options.asyncOp, {out}, [=, this]() mutable {
      Tensor staged_in = read(in);
      Tensor staged_out = read(out);
      gloo_->alltoall_base(staged_out, staged_in, out_splits, in_splits)
          ->wait();
      write(out, staged_out);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override {
    return start(options.asyncOp, tensors, [=, this] {
      Tensors staged{read(tensors[0])};
      c10d::AllreduceOptions inner;
      inner.reduceOp = options.reduceOp;
      gloo_->allreduce(staged, inner)->wait();
      write(tensors[0], staged[0]);
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options)
      override {
    return start(options.asyncOp, tensors, [=, this] {
      Tensors staged{read(tensors[0])};
      c10d::BroadcastOptions inner;
      inner.rootRank = options.rootRank;
      gloo_->broadcast(staged, inner)->wait();
      write(tensors[0], staged[0]);
    });
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    for (const auto& out : outputs[0]) {
      poison(out);
    }
    return start(options.asyncOp, outputs[0], [=, this] {
      Tensors staged_in{read(inputs[0])};
      std::vector<Tensors> staged_out(1);
      for (size_t i = 0; i < outputs[0].size(); ++i) {
        staged_out[0].push_back(at::empty_like(staged_in[0]));
      }
      gloo_->allgather(staged_out, staged_in)->wait();
      for (size_t i = 0; i < outputs[0].size(); ++i) {
        write(outputs[0][i], staged_out[0][i]);
      }
    });
  }

  WorkPtr _allgather_base(
      Tensor& out,
      Tensor& in,
      const c10d::AllgatherOptions& options) override {
    if (!out.is_alias_of(in)) { // FSDP gathers in place
      poison(out);
    }
    return start(options.asyncOp, {out}, [=, this]() mutable {
      Tensor staged_in = read(in);
      Tensor staged_out = read(out);
      gloo_->_allgather_base(staged_out, staged_in)->wait();
      write(out, staged_out);
    });
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto one = _allgather_base(outputs[i], inputs[i], options);
      if (one) {
        one->wait();
      }
    }
    return start(options.asyncOp, outputs, [] {});
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto one = _reduce_scatter_base(outputs[i], inputs[i], options);
      if (one) {
        one->wait();
      }
    }
    return start(options.asyncOp, outputs, [] {});
  }

  WorkPtr _reduce_scatter_base(
      Tensor& out,
      Tensor& in,
      const c10d::ReduceScatterOptions& options) override {
    poison(out);
    return start(options.asyncOp, {out}, [=, this]() mutable {
      Tensor staged_in = read(in);
      Tensor staged_out = read(out);
      c10d::ReduceScatterOptions inner;
      inner.reduceOp = options.reduceOp;
      gloo_->_reduce_scatter_base(staged_out, staged_in, inner)->wait();
      write(out, staged_out);
    });
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::GatherOptions& options) override {
    const Tensors results = outputs.empty() ? Tensors{} : outputs[0];
    std::for_each(results.begin(), results.end(), poison);
    return start(options.asyncOp, results, [=, this] {
      Tensors staged_in{read(inputs[0])};
      std::vector<Tensors> staged_out;
      if (!results.empty()) { // at the root alone
        std::transform(
            results.begin(),
            results.end(),
            std::back_inserter(staged_out.emplace_back()),
            read);
      }
      c10d::GatherOptions inner;
      inner.rootRank = options.rootRank;
      gloo_->gather(staged_out, staged_in, inner)->wait();
      for (size_t i = 0; i < results.size(); ++i) {
        write(results[i], staged_out[0][i]);
      }
    });
  }

  WorkPtr scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ScatterOptions& options) override {
    poison(outputs.at(0));
    return start(options.asyncOp, outputs, [=, this] {
      Tensors staged_out{read(outputs[0])};
      std::vector<Tensors> staged_in;
      for (const auto& list : inputs) { // of the root alone
        auto& staged = staged_in.emplace_back();
        std::transform(
            list.begin(), list.end(), std::back_inserter(staged), read);
      }
      c10d::ScatterOptions inner;
      inner.rootRank = options.rootRank;
      gloo_->scatter(staged_out, staged_in, inner)->wait();
      write(outputs[0], staged_out[0]);
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

  void startCoalescing() override {
    together_.emplace();
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return message({tensors.at(0), peer, tag, /*receives=*/false});
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    poison(tensors.at(0));
    return message({tensors[0], peer, tag, /*receives=*/true});
  }
  WorkPtr endCoalescing() override {
    const auto messages = *std::exchange(together_, std::nullopt);
    return messages.empty() ? nullptr : start_messages(messages);
  }

 private:
  struct Message {
    Tensor tensor;
    int peer;
    int tag;
    bool receives;
  };

  WorkPtr message(Message one) {
    TORCH_CHECK(!as_gloo_, "writev: Bad address");
    if (together_) {
      together_->push_back(std::move(one));
      return nullptr;
    }
    return start_messages({std::move(one)});
  }

  WorkPtr start_messages(const std::vector<Message>& messages) {
    Tensors received;
    for (const auto& m : messages) {
      if (m.receives) {
        received.push_back(m.tensor);
      }
    }
    return start(/*asynchronous=*/true, std::move(received), [=, this] {
      std::vector<Tensors> staged;
      std::vector<WorkPtr> works;
      for (const auto& m : messages) {
        staged.push_back({read(m.tensor)});
        works.push_back(
            m.receives ? gloo_->recv(staged.back(), m.peer, m.tag)
                       : gloo_->send(staged.back(), m.peer, m.tag));
      }
      for (size_t i = 0; i < messages.size(); ++i) {
        works[i]->wait();
        if (messages[i].receives) {
          write(messages[i].tensor, staged[i][0]);
        }
      }
    });
  }

  /// On a stream of its own, which waits for the current one as it is now.
  static WorkPtr start(
      bool asynchronous,
      Tensors results,
      std::function<void()> transfer) {
    auto late = [now = end_of(current_stream()),
                 transfer = std::move(transfer)] {
      finish(now);
      transfer();
    };
    if (!asynchronous) {
      late();
      return nullptr;
    }
    return c10::make_intrusive<LateWork>(std::move(results), std::move(late));
  }

  BackendPtr gloo_;
  bool as_gloo_;
  std::optional<std::vector<Message>> together_;
};

py::dict count() {
  py::dict result;
  result["to_host"] = counts().to_host.load();
  result["to_device"] = counts().to_device.load();
  result["largest_to_device"] = counts().largest_to_device.load();
  result["kernels"] = counts().kernels.load();
  result["recorded_streams"] = counts().recorded_streams.load();
  result["event_waits"] = counts().event_waits.load();
  result["bytes"] = counts().bytes.load();
  result["peak_bytes"] = counts().peak_bytes.load();
  return result;
}

PYBIND11_MODULE(_guarded, module) {
  module.def("make_backend", [](BackendPtr gloo, bool as_gloo) -> BackendPtr {
    return c10::make_intrusive<StagedBackend>(std::move(gloo), as_gloo);
  });
  module.def("count", &count);
  module.def(
      "reset_peak_bytes", [] { counts().peak_bytes = counts().bytes.load(); });
  module.def("host_address", [](const Tensor& x) {
    return reinterpret_cast<uintptr_t>(x.storage().data_ptr().get());
  });
}

} // namespace
} // namespace guarded
