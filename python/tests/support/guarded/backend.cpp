#include <functional>
#include <optional>
#include <utility>

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
  explicit LateWork(std::function<void()> finish)
      : finish_(std::move(finish)) {}
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

 private:
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
    return start(options.asyncOp, [=, this]() mutable {
      Tensor staged_in = read(in);
      Tensor staged_out = read(out);
      gloo_->alltoall_base(staged_out, staged_in, out_splits, in_splits)
          ->wait();
      write(out, staged_out);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override {
    return start(options.asyncOp, [=, this] {
      Tensors staged{read(tensors[0])};
      c10d::AllreduceOptions inner;
      inner.reduceOp = options.reduceOp;
      gloo_->allreduce(staged, inner)->wait();
      write(tensors[0], staged[0]);
    });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options)
      override {
    return start(options.asyncOp, [=, this] {
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
    return start(options.asyncOp, [=, this] {
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
    poison(out);
    return start(options.asyncOp, [=, this]() mutable {
      Tensor staged_in = read(in);
      Tensor staged_out = read(out);
      gloo_->_allgather_base(staged_out, staged_in)->wait();
      write(out, staged_out);
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
    return start(/*asynchronous=*/true, [=, this] {
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
  static WorkPtr start(bool asynchronous, std::function<void()> transfer) {
    auto late = [now = end_of(current_stream()),
                 transfer = std::move(transfer)] {
      finish(now);
      transfer();
    };
    if (!asynchronous) {
      late();
      return nullptr;
    }
    return c10::make_intrusive<LateWork>(std::move(late));
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
