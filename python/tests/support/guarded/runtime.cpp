#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "queue.h"

// One device with streams, see queue.h.

namespace guarded {
namespace {

const c10::Device kOnly(kDevice, 0);

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  GuardImpl() = default;
  explicit GuardImpl(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kOnly;
  }
  c10::Device getDevice() const override {
    return kOnly;
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return stream(current_stream());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream(0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return stream(++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream(), next.id()));
  }
  /// Who asks again and again shall see an end.
  bool queryStream(const c10::Stream& stream) const override {
    finish(end_of(stream.id()));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++counts().to_host;
    finish(end_of(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    ++counts().to_host;
    finish_all();
  }

  void record(
      void** event,
      const c10::Stream& stream,
      c10::DeviceIndex,
      c10::EventFlag) const override {
    auto*& recorded = *reinterpret_cast<Point**>(event);
    if (!recorded) {
      recorded = new Point();
    }
    *recorded = end_of(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto* point = static_cast<Point*>(event);
    if (point && point->stream != stream.id()) {
      ++counts().event_waits;
      wait(stream.id(), *point);
    }
  }
  bool queryEvent(void* event) const override {
    if (event) {
      finish(*static_cast<Point*>(event));
    }
    return true;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Point*>(event);
  }
  void synchronizeEvent(void* event) const override {
    ++counts().to_host;
    queryEvent(event);
  }
  void recordDataPtrOnStream(
      const c10::DataPtr& memory,
      const c10::Stream& stream) const override {
    guarded::record(memory, stream.id());
  }

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kOnly, id);
  }
};

/// Host memory with a name of its own.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    void* pointer = memory.get();
    last() = pointer;
    return memory;
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void*, const void*, size_t) const override {}
  static void*& last() {
    static void* pointer = nullptr;
    return pointer;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes)
      const override {
    resize_storage(storage, bytes);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* pinned = new PinnedAllocator();
    return pinned;
  }
  bool isPinnedPtr(const void* pointer) const override {
    return pointer && pointer == PinnedAllocator::last();
  }
};

const bool registered = [] {
  c10::SetAllocator(kDevice, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

} // namespace guarded
