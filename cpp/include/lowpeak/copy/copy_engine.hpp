#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lowpeak/copy/device.hpp"
#include "lowpeak/copy/event_pool.hpp"
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
  std::uint64_t transfers = 0;  ///< Calls of the driver: one a run of host memory.
  std::uint64_t handovers = 0;  ///< Rooms that were used again while copies still used them.
  std::uint64_t failures = 0;   ///< Calls of the driver that failed.
  std::size_t events = 0;       ///< Events that were made.
  std::size_t leaving = 0;      ///< Rooms that were given up, and that copies use now.
};

/// @brief Copies between one device and a pool of host memory, beside the device's computation.
///
/// Two streams, one a direction. Memory of the device is addresses and sizes, its streams are
/// handles: whoever calls keeps the memory alive until done() or until after wait(). `current` is
/// the stream that the caller computes on. Each method is for any thread; none but synchronize()
/// and the destructor waits for the device. In a forked child all throw host::ForkedError, except
/// release() and the destructor, which do nothing. A device that is lost is not called any more:
/// everything throws CopyError, and the memory that copies may touch stays as it is.
class CopyEngine {
 public:
  /// @throws CopyError
  CopyEngine(std::shared_ptr<host::HostPool> pool, std::shared_ptr<StreamDriver> driver)
      : pool_(std::move(pool)),
        device_(std::make_shared<Device>(std::move(driver))),
        events_(std::make_shared<EventPool>(device_)),
        rooms_(std::make_unique<Rooms>(pool_, device_)),
        out_(device_->create_stream()),
        in_(device_->create_stream()) {}

  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  ~CopyEngine() {
    if (!guard_.may_release() || !quiet()) {
      // Copies may run: neither the rooms nor the pool below them may end.
      leak();
      return;
    }
    rooms_.reset();
    device_->destroy_stream(out_);
    device_->destroy_stream(in_);
  }

  const char* name() const noexcept { return device_->name(); }

  /// @throws host::HostMemoryError
  Rooms::Id allocate(std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(entered());
    return rooms_->allocate(nbytes);
  }

  void release(Rooms::Id room) {
    if (!guard_.may_release()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    rooms_->release(room);
  }

  /// From the device into a room, after all that `current` has queued.
  /// @throws CopyError; then nothing of the device's memory is read after what `current` does next
  Ticket copy_out(Rooms::Id id, std::uintptr_t source, std::size_t nbytes, Stream current) {
    const std::lock_guard<std::mutex> lock(entered());
    Room& room = fitting(id, nbytes);
    auto ended = std::make_shared<const PooledEvent>(events_);
    order(out_, current, Wait::out_for_source);
    if (room.read != nullptr && kept(Wait::out_for_reader)) {
      device_->wait(out_, room.read->event());
    }
    issue(ended, out_, current, room.written, [&] {
      std::uintptr_t from = source;
      for (const host::Run& run : room.runs) {
        device_->copy_out(run.data, from, run.nbytes, out_);
        from += run.nbytes;
      }
    });
    count(statistics_.copies_out, statistics_.bytes_out, room);
    return ended;
  }

  /// From a room to the device, after the copy `after` and all that `current` has queued.
  /// @throws CopyError; then nothing of the device's memory is written after what `current` does
  /// next
  Ticket copy_in(Rooms::Id id, std::uintptr_t target, std::size_t nbytes, Stream current,
                 const Ticket& after) {
    const std::lock_guard<std::mutex> lock(entered());
    Room& room = fitting(id, nbytes);
    auto ended = std::make_shared<const PooledEvent>(events_);
    order(in_, current, Wait::in_for_target);
    if (kept(Wait::in_for_copy_out)) device_->wait(in_, after->event());
    issue(ended, in_, current, room.read, [&] {
      std::uintptr_t to = target;
      for (const host::Run& run : room.runs) {
        device_->copy_in(to, run.data, run.nbytes, in_);
        to += run.nbytes;
      }
    });
    count(statistics_.copies_in, statistics_.bytes_in, room);
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
    if (kept(Wait::user_for_copy)) device_->wait(current, ticket->event());
  }

  /// Lets `current` go on after all that `marked` has queued only.
  void follow(Stream current, Stream marked) {
    const std::lock_guard<std::mutex> lock(entered());
    order(current, marked, Wait::follow_mark);
  }

  /// Blocks the host until every copy has ended; other threads may go on.
  void synchronize() {
    std::vector<Ticket> ends;
    {
      const std::lock_guard<std::mutex> lock(entered());
      for (const Stream stream : {out_, in_}) {
        auto end = std::make_shared<const PooledEvent>(events_);
        device_->record(end->event(), stream);
        ends.push_back(std::move(end));
      }
    }
    for (const Ticket& end : ends) {
      if (kept(Wait::host_for_copies)) device_->synchronize_event(end->event());
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    rooms_->collect();
  }

  CopyStatistics statistics() {
    const std::lock_guard<std::mutex> lock(entered());
    rooms_->collect();
    CopyStatistics result = statistics_;
    result.handovers = rooms_->handovers();
    result.leaving = rooms_->leaving();
    result.failures = device_->failures();
    result.events = events_->made();
    return result;
  }

  /// Lets calls of the driver fail; see Device::fail().
  void fail(CopySite site, std::uint64_t skip, std::uint64_t times, bool loses) {
    device_->fail(site, skip, times, loses);
  }

 private:
  std::mutex& entered() const {
    guard_.check();
    return mutex_;
  }

  Room& fitting(Rooms::Id id, std::size_t nbytes) {
    Room& room = rooms_->at(id);
    if (room.nbytes != nbytes) {
      throw std::invalid_argument("room " + std::to_string(id) + " has " +
                                  std::to_string(room.nbytes) + " bytes, not " +
                                  std::to_string(nbytes));
    }
    return room;
  }

  /// What `later` does from now on comes after all that `earlier` has queued.
  void order(Stream later, Stream earlier, Wait reason) {
    if (later == earlier) return;
    const PooledEvent mark(events_);
    device_->record(mark.event(), earlier);
    if (kept(reason)) device_->wait(later, mark.event());
  }

  template <typename Copies>
  void issue(const Ticket& ended, Stream side, Stream current, Ticket& last, Copies copies) {
    try {
      copies();
      device_->record(ended->event(), side);
    } catch (const CopyError&) {
      give_up(ended, side, current, last);
      throw;
    }
    last = ended;
  }

  /// After a copy that failed half way: the other half may still be copied.
  void give_up(const Ticket& ended, Stream side, Stream current, Ticket& last) {
    try {
      device_->record(ended->event(), side);
      last = ended;
      if (kept(Wait::user_for_failed)) device_->wait(current, ended->event());
      return;
    } catch (const CopyError&) {
    }
    try {
      device_->synchronize_stream(side);
    } catch (const CopyError& error) {
      device_->lose(error.what());
    }
  }

  void count(std::uint64_t& copies, std::uint64_t& bytes, const Room& room) {
    ++copies;
    bytes += room.nbytes;
    statistics_.transfers += room.runs.size();
  }

  /// Whether no copy runs any more.
  bool quiet() noexcept {
    try {
      if (kept(Wait::end_for_copies)) {
        device_->synchronize_stream(out_);
        device_->synchronize_stream(in_);
      }
      return true;
    } catch (const CopyError&) {
      return false;
    }
  }

  /// Keeps what copies may touch until the process ends.
  void leak() noexcept {
    static auto* kept_rooms = new std::vector<std::unique_ptr<Rooms>>;
    static auto* mutex = new std::mutex;
    if (guard_.forked()) {
      static_cast<void>(rooms_.release());
      return;
    }
    const std::lock_guard<std::mutex> lock(*mutex);
    kept_rooms->push_back(std::move(rooms_));
  }

  mutable std::mutex mutex_;
  host::ProcessGuard guard_;
  std::shared_ptr<host::HostPool> pool_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<EventPool> events_;
  std::unique_ptr<Rooms> rooms_;
  Stream out_;
  Stream in_;
  CopyStatistics statistics_;
};

}  // namespace lowpeak::copy
