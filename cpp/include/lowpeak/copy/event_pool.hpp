#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "lowpeak/copy/device.hpp"
#include "lowpeak/host/process_guard.hpp"

namespace lowpeak::copy {

/// @brief Events of one device, used again and again: creating one costs microseconds.
///
/// An event may come back while streams still wait for it: they wait for what was recorded when
/// they were told to. For any thread.
class EventPool {
 public:
  explicit EventPool(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;
  ~EventPool() {
    if (!guard_.may_release()) return;
    for (const Event event : idle_) device_->destroy_event(event);
  }

  /// @throws CopyError
  Event take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      const Event event = idle_.back();
      idle_.pop_back();
      return event;
    }
    idle_.reserve(made_ + 1);  // so that give() never allocates
    const Event event = device_->create_event();
    ++made_;
    return event;
  }

  void give(Event event) noexcept {
    if (!guard_.may_release()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(event);
  }

  std::size_t made() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return made_;
  }

 private:
  std::shared_ptr<Device> device_;
  host::ProcessGuard guard_;
  mutable std::mutex mutex_;
  std::vector<Event> idle_;
  std::size_t made_ = 0;
};

/// @brief An event out of a pool, which it goes back to: the end of a copy, or a place in a stream.
class PooledEvent {
 public:
  /// @throws CopyError
  explicit PooledEvent(std::shared_ptr<EventPool> pool)
      : pool_(std::move(pool)), event_(pool_->take()) {}

  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;
  ~PooledEvent() { pool_->give(event_); }

  Event event() const noexcept { return event_; }

 private:
  std::shared_ptr<EventPool> pool_;
  Event event_;
};

}  // namespace lowpeak::copy
