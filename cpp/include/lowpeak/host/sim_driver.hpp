#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

#include "lowpeak/host/driver.hpp"

namespace lowpeak::host {

/// @brief A driver without a device that checks how it is used.
///
/// Registering what overlaps a registered range, unregistering or freeing what is not there: each
/// is an error, as it is for real drivers. Memory given back is poisoned.
class SimDriver final : public Driver {
 public:
  const char* name() const noexcept override { return "sim"; }
  bool pins() const noexcept override { return true; }
  bool poisons() const noexcept override { return true; }

  Outcome register_host(void* data, std::size_t nbytes) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (overlaps(data, nbytes)) return {false, "sim: the memory is already registered"};
    registered_[address(data)] = nbytes;
    return {};
  }

  Outcome unregister_host(void* data) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (registered_.erase(address(data)) == 0) return {false, "sim: the memory is not registered"};
    return {};
  }

  Outcome allocate_host(std::size_t nbytes, void** data) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    *data = ::operator new(nbytes, alignment, std::nothrow);
    if (*data == nullptr) return {false, "sim: out of memory"};
    allocated_[address(*data)] = nbytes;
    return {};
  }

  Outcome free_host(void* data) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (allocated_.erase(address(data)) == 0) return {false, "sim: not memory of this driver"};
    ::operator delete(data, alignment);
    return {};
  }

  /// Bytes that are registered or allocated now.
  std::size_t held() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t sum = 0;
    for (const auto& range : registered_) sum += range.second;
    for (const auto& range : allocated_) sum += range.second;
    return sum;
  }

 private:
  static constexpr std::align_val_t alignment{std::size_t{2} << 20};

  static std::uintptr_t address(const void* data) noexcept {
    return reinterpret_cast<std::uintptr_t>(data);
  }

  bool overlaps(const void* data, std::size_t nbytes) const {
    const auto after = registered_.lower_bound(address(data) + nbytes);
    if (after == registered_.begin()) return false;
    const auto& [begin, size] = *std::prev(after);
    return begin + size > address(data);
  }

  mutable std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> registered_;
  std::map<std::uintptr_t, std::size_t> allocated_;
};

}  // namespace lowpeak::host
