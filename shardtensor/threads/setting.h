#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace shardtensor {

/// A value of the process, which a thread may have its own in the place of:
/// what Python's with-blocks say holds for their thread, as no_grad does, and
/// leaves other threads what they had. Backward runs in threads of PyTorch's,
/// too.
class IntegerSetting {
 public:
  /// `name` is that of the with-block, and lives as long as the process.
  IntegerSetting(const char* name, int64_t value);
  IntegerSetting(const IntegerSetting&) = delete;
  IntegerSetting& operator=(const IntegerSetting&) = delete;

  int64_t get() const;
  /// This thread's where it has its own, else the process's.
  void set(int64_t value);

 private:
  int64_t index_;
};

template <typename T>
class Setting {
 public:
  Setting(const char* name, T value)
      : integer_(name, static_cast<int64_t>(value)) {}
  operator T() const {
    return static_cast<T>(integer_.get());
  }
  void operator=(T value) {
    integer_.set(static_cast<int64_t>(value));
  }

 private:
  IntegerSetting integer_;
};

/// Gives this thread its own value, which is first the present one; returns the
/// own value that it had. ValueError where no setting has the name.
std::optional<int64_t> hold_setting(const std::string& name);
/// Ends that: the thread has the own value `before` again, or none.
void release_setting(const std::string& name, std::optional<int64_t> before);

} // namespace shardtensor
