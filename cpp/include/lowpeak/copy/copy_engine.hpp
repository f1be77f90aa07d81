#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lowpeak/copy/bounce.hpp"
#include "lowpeak/copy/device.hpp"
#include "lowpeak/copy/event_pool.hpp"
#include "lowpeak/copy/order.hpp"
#include "lowpeak/copy/rooms.hpp"
#include "lowpeak/copy/stream_driver.hpp"
#include "lowpeak/copy/waits.hpp"
#include "lowpeak/host/host_pool.hpp"
#include "lowpeak/host/process_guard.hpp"

namespace lowpeak::copy {

/// @brief What an engine did so far.
struct CopyStatistics {
  std::uint64_t copies_out = 0;
  std::uint64_t copies_in = 0;
  std::uint64_t bytes_out = 0;
  std::uint64_t bytes_in = 0;
  std::uint64_t plain_bytes_out = 0;  ///< Those of them that went to plain memory.
  std::uint64_t plain_bytes_in = 0;
  std::uint64_t transfers = 0;  ///< Pieces of pinned memory that were copied.
  std::uint64_t handovers = 0;  ///< Rooms that were used again while copies still used them.
  std::uint64_t failures = 0;   ///< Calls of the driver that failed.
  std::size_t events = 0;       ///< Events that were made.
  std::size_t leaving = 0;      ///< Rooms that were given up, and that copies use now.
  std::size_t ring_bytes = 0;   ///< Pinned bytes that plain memory is copied through.
  std::size_t plain_reserved_bytes = 0;
  std::size_t plain_live_bytes = 0;
};

/// @brief Copies between one device and a pool of host memory, beside the device's computation.
///
/// Two streams, one a direction; or, where they are to be a part of the computation, the stream of
/// whoever asks. Where pinned memory is refused there is plain memory (see Bounce). Memory of the
/// device is addresses and sizes, its streams are handles: whoever calls keeps the memory alive
/// until done() or until after wait(). `current` is the stream that the caller computes on. Each
/// method is for any thread; none but synchronize() and the destructor waits for the device. In a
/// forked child all throw host::ForkedError, except release() and the destructor, which do nothing.
/// A device that is lost is not called any more: everything throws CopyError, and the memory that
/// copies may touch stays as it is.
class CopyEngine {
 public:
  /// @param beside  False: copies are a part of the stream that is current.
  /// @throws CopyError
  CopyEngine(std::shared_ptr<host::HostPool> pool, std::shared_ptr<StreamDriver> driver,
             bool beside = true)
      : device_(std::make_shared<Device>(std::move(driver))),
        events_(std::make_shared<EventPool>(device_)),
        order_(device_, events_),
        memory_(std::make_unique<Memory>(pool, device_, order_)),
        beside_(beside),
        out_(beside ? device_->create_stream() : 0),
        in_(beside ? device_->create_stream() : 0) {}

  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  ~CopyEngine() {
    if (!guard_.may_release() || !quiet()) {
      // Copies may run: neither the rooms nor the pool below them may end.
      leak();
      return;
    }
    memory_.reset();
    if (!beside_) return;
    device_->destroy_stream(out_);
    device_->destroy_stream(in_);
  }

  const char* name() const noexcept { return device_->name(); }

  /// A pinned room.
  /// @param may_grow  Whether the pool may ask for a further segment, which takes milliseconds.
  /// @throws host::HostMemoryError
  Rooms::Id allocate(std::size_t nbytes, bool may_grow = true) {
    const std::lock_guard<std::mutex> lock(entered());
    return memory_->rooms.allocate(nbytes, may_grow);
  }

  /// A room of plain memory, which copies reach at the rate of one thread of the host.
  /// @throws host::HostMemoryError where the budget, or pinned memory for the ring, is used up
  Rooms::Id allocate_plain(std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(entered());
    memory_->bounce.prepare();
    return memory_->rooms.allocate_plain(nbytes);
  }

  /// Keeps pinned memory for the ring, if the pool has it free; whether it is kept.
  bool reserve_ring() {
    const std::lock_guard<std::mutex> lock(entered());
    return memory_->bounce.reserve();
  }

  /// A step begins: segments of host memory that none of the last `idle_steps` used go back.
  void begin_step(std::uint64_t idle_steps) {
    const std::lock_guard<std::mutex> lock(entered());
    memory_->rooms.begin_step(idle_steps);
  }

  void release(Rooms::Id room) {
    if (!guard_.may_release()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_->rooms.release(room);
  }

  /// From the device into a room, after all that `current` has queued.
  /// @throws CopyError; then nothing of the device's memory is read after what `current` does next
  Ticket copy_out(Rooms::Id id, std::uintptr_t source, std::size_t nbytes, Stream current) {
    const std::lock_guard<std::mutex> lock(entered());
    Room& room = fitting(id, nbytes);
    const bool plain = memory_->rooms.is_plain(room);
    const Stream side = beside_ ? out_ : current;
    const Lanes lanes{side, plain && beside_ ? memory_->bounce.out() : side};
    order_.streams(side, current, Wait::out_for_source);
    order_.after(lanes.host, room.read, Wait::out_for_reader);
    if (!beside_) order_.after(lanes.host, room.written, Wait::out_for_others);
    const Ticket ended = issue({lanes.device, lanes.host}, current, room.written, [&] {
      if (plain) return memory_->bounce.copy_out(room.runs, source, lanes);
      std::uintptr_t from = source;
      for (const host::Run& run : room.runs) {
        device_->copy_out(run.data, from, run.nbytes, side);
        from += run.nbytes;
      }
    });
    ++statistics_.copies_out;
    statistics_.bytes_out += nbytes;
    (plain ? statistics_.plain_bytes_out : statistics_.transfers) +=
        plain ? nbytes : room.runs.size();
    return ended;
  }

  /// From a room to the device, after the copy `after` and all that `current` has queued.
  /// @throws CopyError; then nothing of the device's memory is written after what `current` does
  /// next
  Ticket copy_in(Rooms::Id id, std::uintptr_t target, std::size_t nbytes, Stream current,
                 const Ticket& after) {
    const std::lock_guard<std::mutex> lock(entered());
    Room& room = fitting(id, nbytes);
    const bool plain = memory_->rooms.is_plain(room);
    const Stream side = beside_ ? in_ : current;
    const Lanes lanes{side, plain && beside_ ? memory_->bounce.in() : side};
    order_.streams(side, current, Wait::in_for_target);
    order_.after(lanes.host, after, Wait::in_for_copy_out);
    if (!beside_) order_.after(lanes.host, room.read, Wait::in_for_others);
    const Ticket ended = issue({lanes.host, lanes.device}, current, room.read, [&] {
      if (plain) return memory_->bounce.copy_in(room.runs, target, lanes);
      std::uintptr_t to = target;
      for (const host::Run& run : room.runs) {
        device_->copy_in(to, run.data, run.nbytes, side);
        to += run.nbytes;
      }
    });
    ++statistics_.copies_in;
    statistics_.bytes_in += nbytes;
    (plain ? statistics_.plain_bytes_in : statistics_.transfers) +=
        plain ? nbytes : room.runs.size();
    return ended;
  }

  /// Whether a copy has ended.
  bool done(const Ticket& ticket) {
    const std::lock_guard<std::mutex> lock(entered());
    return !kept(Wait::done_for_copy) || device_->passed(ticket->event());
  }

  /// Lets `current` go on after a copy only.
  void wait(const Ticket& ticket, Stream current) {
    const std::lock_guard<std::mutex> lock(entered());
    order_.after(current, ticket, Wait::user_for_copy);
  }

  /// Lets `current` go on after all that `marked` has queued only.
  void follow(Stream current, Stream marked) {
    const std::lock_guard<std::mutex> lock(entered());
    order_.streams(current, marked, Wait::follow_mark);
  }

  /// Blocks the host until every copy has ended; other threads may go on.
  void synchronize() {
    std::vector<Ticket> ends;
    {
      const std::lock_guard<std::mutex> lock(entered());
      for (const auto& [stream, end] : ends_) ends.push_back(end);
    }
    for (const Ticket& end : ends) {
      if (kept(Wait::host_for_copies)) device_->synchronize_event(end->event());
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_->rooms.collect();
  }

  CopyStatistics statistics() {
    const std::lock_guard<std::mutex> lock(entered());
    memory_->rooms.collect();
    const host::PoolStatistics plain = memory_->rooms.plain();
    CopyStatistics result = statistics_;
    result.handovers = memory_->rooms.handovers();
    result.leaving = memory_->rooms.leaving();
    result.failures = device_->failures();
    result.events = events_->made();
    result.ring_bytes = memory_->bounce.nbytes();
    result.plain_reserved_bytes = plain.reserved;
    result.plain_live_bytes = plain.live;
    return result;
  }

  /// Lets calls of the driver fail; see Device::fail().
  void fail(CopySite site, std::uint64_t skip, std::uint64_t times, bool loses) {
    device_->fail(site, skip, times, loses);
  }

 private:
  /// All that copies may touch: it ends after them.
  struct Memory {
    Memory(const std::shared_ptr<host::HostPool>& pool, const std::shared_ptr<Device>& device,
           const Order& order)
        : rooms(pool, device), bounce(pool, device, order) {}
    Rooms rooms;
    Bounce bounce;
  };

  /// The streams of a copy, the last of which ends it.
  struct Course {
    Stream first;
    Stream last;
  };

  std::mutex& entered() const {
    guard_.check();
    return mutex_;
  }

  Room& fitting(Rooms::Id id, std::size_t nbytes) {
    Room& room = memory_->rooms.at(id);
    if (room.nbytes != nbytes) {
      throw std::invalid_argument("room " + std::to_string(id) + " has " +
                                  std::to_string(room.nbytes) + " bytes, not " +
                                  std::to_string(nbytes));
    }
    return room;
  }

  template <typename Copies>
  Ticket issue(const Course& course, Stream current, Ticket& last, Copies copies) {
    const Ticket ended = order_.ticket();
    try {
      copies();
      device_->record(ended->event(), course.last);
    } catch (const CopyError&) {
      give_up(ended, course, current, last);
      throw;
    }
    ends_[course.last] = last = ended;
    return ended;
  }

  /// After a copy that failed half way: the other half may still be copied.
  void give_up(const Ticket& ended, const Course& course, Stream current, Ticket& last) {
    try {
      order_.streams(course.last, course.first, Wait::user_for_failed);
      device_->record(ended->event(), course.last);
      ends_[course.last] = last = ended;
      memory_->bounce.used_until(ended);
      order_.after(current, ended, Wait::user_for_failed);
      return;
    } catch (const CopyError&) {
    }
    try {
      device_->synchronize_stream(course.first);
      device_->synchronize_stream(course.last);
    } catch (const CopyError& error) {
      device_->lose(error.what());
    }
  }

  /// Whether no copy runs any more.
  bool quiet() noexcept {
    try {
      for (const auto& [stream, end] : ends_) {
        if (kept(Wait::end_for_copies)) device_->synchronize_event(end->event());
      }
      return !device_->lost();
    } catch (const CopyError&) {
      return false;
    }
  }

  /// Keeps what copies may touch until the process ends.
  void leak() noexcept {
    static auto* all = new std::vector<std::unique_ptr<Memory>>;
    static auto* mutex = new std::mutex;
    if (guard_.forked()) {
      static_cast<void>(memory_.release());
      return;
    }
    const std::lock_guard<std::mutex> lock(*mutex);
    all->push_back(std::move(memory_));
  }

  mutable std::mutex mutex_;
  host::ProcessGuard guard_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<EventPool> events_;
  Order order_;
  std::unique_ptr<Memory> memory_;
  const bool beside_;
  Stream out_;
  Stream in_;
  std::map<Stream, Ticket> ends_;  ///< The last copy of each stream.
  CopyStatistics statistics_;
};

}  // namespace lowpeak::copy
