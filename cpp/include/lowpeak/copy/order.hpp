#pragma once

#include <memory>

#include "lowpeak/copy/device.hpp"
#include "lowpeak/copy/event_pool.hpp"
#include "lowpeak/copy/waits.hpp"

namespace lowpeak::copy {

/// @brief The end of one copy.
using Ticket = std::shared_ptr<const PooledEvent>;

/// @brief What waits for what on one device, by events of a pool.
class Order {
 public:
  Order(std::shared_ptr<Device> device, std::shared_ptr<EventPool> events)
      : device_(std::move(device)), events_(std::move(events)) {}

  /// An event that marks nothing yet.
  Ticket ticket() const { return std::make_shared<const PooledEvent>(events_); }

  /// A ticket for all that a stream has queued.
  Ticket end_of(Stream stream) const {
    Ticket end = ticket();
    device_->record(end->event(), stream);
    return end;
  }

  /// What `later` does from now on comes after a copy; null is none.
  void after(Stream later, const Ticket& copy, Wait reason) const {
    if (copy != nullptr && kept(reason)) device_->wait(later, copy->event());
  }

  /// What `later` does from now on comes after all that `earlier` has queued.
  void streams(Stream later, Stream earlier, Wait reason) const {
    if (later == earlier) return;
    // The event may go back at once: a wait is for what was recorded when it was queued.
    after(later, end_of(earlier), reason);
  }

 private:
  std::shared_ptr<Device> device_;
  std::shared_ptr<EventPool> events_;
};

}  // namespace lowpeak::copy
