#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lowpeak/copy/device.hpp"
#include "lowpeak/copy/event_pool.hpp"
#include "lowpeak/copy/waits.hpp"
#include "lowpeak/host/error.hpp"
#include "lowpeak/host/host_pool.hpp"

namespace lowpeak::copy {

/// The end of one copy.
using Ticket = std::shared_ptr<const PooledEvent>;

/// @brief A record of host memory, and the copies that may still touch it.
///
/// Copies of one direction share a stream, so the last of each stands for all before it.
struct Room {
  host::HostPool::Id record;
  std::size_t nbytes;
  std::vector<host::Run> runs;
  Ticket written;  ///< The last copy out, into the room.
  Ticket read;     ///< The last copy in, from the room.
};

/// @brief Rooms out of a pool of host memory, which they go back to when their copies have ended.
///
/// Where the pool would have to grow, a room that was given up while copies still use it goes to
/// the next of its size; the copy out that fills it waits for them on the device, not on the host.
///
/// Not synchronised.
class Rooms {
 public:
  using Id = std::uint64_t;

  Rooms(std::shared_ptr<host::HostPool> pool, std::shared_ptr<Device> device)
      : pool_(std::move(pool)), device_(std::move(device)) {}

  Rooms(const Rooms&) = delete;
  Rooms& operator=(const Rooms&) = delete;
  /// Gives all memory back; no copy may run any more.
  ~Rooms() {
    for (auto& [id, room] : rooms_) pool_->release(room.record);
    for (const Room& room : leaving_) pool_->release(room.record);
  }

  /// @throws host::HostMemoryError where neither the pool nor a room that was given up serves.
  Id allocate(std::size_t nbytes) {
    collect();
    std::optional<Room> room;
    if (pool_->free_bytes() < nbytes) room = taken_over(nbytes);
    if (!room) room = of_pool(nbytes);
    rooms_.emplace(++last_, std::move(*room));
    return last_;
  }

  /// @throws std::invalid_argument for what is not live
  Room& at(Id id) {
    const auto place = rooms_.find(id);
    if (place == rooms_.end()) {
      throw std::invalid_argument("room " + std::to_string(id) + " is not live");
    }
    return place->second;
  }

  /// Gives a room up; its memory goes back when its copies have ended.
  /// @throws std::invalid_argument for what is not live
  void release(Id id) {
    leaving_.push_back(std::move(at(id)));
    rooms_.erase(id);
    collect();
  }

  /// Gives back to the pool what no copy uses any more.
  void collect() {
    while (!leaving_.empty() && settled(leaving_.front())) {
      pool_->release(leaving_.front().record);
      leaving_.pop_front();
    }
  }

  /// Rooms that were given up, and that copies still use.
  std::size_t leaving() const noexcept { return leaving_.size(); }
  std::uint64_t handovers() const noexcept { return handovers_; }

 private:
  Room of_pool(std::size_t nbytes) {
    try {
      return fresh(nbytes);
    } catch (const host::HostMemoryError&) {
      if (std::optional<Room> room = taken_over(nbytes)) return std::move(*room);
    }
    pool_->trim(0);
    return fresh(nbytes);
  }

  Room fresh(std::size_t nbytes) {
    const host::HostPool::Id record = pool_->allocate_record(nbytes);
    return {record, nbytes, pool_->runs(record), nullptr, nullptr};
  }

  /// The oldest room of this size that was given up.
  std::optional<Room> taken_over(std::size_t nbytes) {
    if (device_->lost()) return std::nullopt;
    for (auto place = leaving_.begin(); place != leaving_.end(); ++place) {
      if (place->nbytes != nbytes) continue;
      Room room = std::move(*place);
      leaving_.erase(place);
      ++handovers_;
      return room;
    }
    return std::nullopt;
  }

  bool settled(const Room& room) {
    if (!kept(Wait::release_for_copy)) return true;
    return ended(room.written) && ended(room.read);
  }

  /// False too where the device does not say: then nobody may have the memory.
  bool ended(const Ticket& ticket) {
    if (ticket == nullptr) return true;
    try {
      return device_->passed(ticket->event());
    } catch (const CopyError&) {
      return false;
    }
  }

  std::shared_ptr<host::HostPool> pool_;
  std::shared_ptr<Device> device_;
  std::unordered_map<Id, Room> rooms_;
  std::deque<Room> leaving_;
  Id last_ = 0;
  std::uint64_t handovers_ = 0;
};

}  // namespace lowpeak::copy
