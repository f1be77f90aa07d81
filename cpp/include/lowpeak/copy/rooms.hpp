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
#include "lowpeak/copy/order.hpp"
#include "lowpeak/copy/waits.hpp"
#include "lowpeak/host/error.hpp"
#include "lowpeak/host/host_pool.hpp"

namespace lowpeak::copy {

/// @brief A record of host memory, and the copies that may still touch it.
///
/// Copies of one direction follow each other, so the last of each stands for all before it.
struct Room {
  host::HostPool* pool;  ///< Whose record it is.
  host::HostPool::Id record;
  std::size_t nbytes;
  std::vector<host::Run> runs;
  Ticket written;  ///< The last copy out, into the room.
  Ticket read;     ///< The last copy in, from the room.
};

/// @brief Rooms out of pools of host memory, which they go back to when their copies have ended.
///
/// One pool is pinned; the other is plain, made when it is asked for, and reserves what is left of
/// the same budget.
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
    for (auto& [id, room] : rooms_) room.pool->release(room.record);
    for (const Room& room : leaving_) room.pool->release(room.record);
  }

  /// A pinned room.
  /// @param may_grow  Whether the pool may ask for a further segment.
  /// @throws host::HostMemoryError where neither the pool nor a room that was given up serves.
  Id allocate(std::size_t nbytes, bool may_grow) {
    return allocate(nbytes, may_grow, *pool_, plain_.get());
  }

  /// A room of plain memory.
  /// @throws host::HostMemoryError where the budget has none left.
  Id allocate_plain(std::size_t nbytes) {
    if (plain_ == nullptr) plain_ = pool_->plain_pool();
    return allocate(nbytes, true, *plain_, pool_.get());
  }

  bool is_plain(const Room& room) const noexcept { return room.pool != pool_.get(); }

  /// A step begins: segments that were not used in the last steps go back.
  void begin_step(std::uint64_t idle_steps) {
    collect();
    pool_->begin_step(idle_steps);
    if (plain_ != nullptr) plain_->begin_step(idle_steps);
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
      leaving_.front().pool->release(leaving_.front().record);
      leaving_.pop_front();
    }
  }

  /// Rooms that were given up, and that copies still use.
  std::size_t leaving() const noexcept { return leaving_.size(); }
  std::uint64_t handovers() const noexcept { return handovers_; }

  /// Of plain memory: bytes in segments, and bytes of rooms.
  host::PoolStatistics plain() const {
    return plain_ == nullptr ? host::PoolStatistics{} : plain_->statistics().pool;
  }

 private:
  Id allocate(std::size_t nbytes, bool may_grow, host::HostPool& pool, host::HostPool* other) {
    collect();
    std::optional<Room> room;
    if (pool.free_bytes() < nbytes) room = taken_over(nbytes, pool);
    if (!room) room = of_pool(nbytes, may_grow, pool, other);
    rooms_.emplace(++last_, std::move(*room));
    return last_;
  }

  /// A record is made of free segments as they are: those of the other pool, which hold a part of
  /// the same budget, are what can be trimmed for it.
  Room of_pool(std::size_t nbytes, bool may_grow, host::HostPool& pool, host::HostPool* other) {
    try {
      return fresh(nbytes, may_grow, pool);
    } catch (const host::HostMemoryError&) {
      if (std::optional<Room> room = taken_over(nbytes, pool)) return std::move(*room);
      if (!may_grow || other == nullptr || other->trim(0) == 0) throw;
    }
    return fresh(nbytes, may_grow, pool);
  }

  static Room fresh(std::size_t nbytes, bool may_grow, host::HostPool& pool) {
    const host::HostPool::Id record = pool.allocate_record(nbytes, may_grow);
    return {&pool, record, nbytes, pool.runs(record), nullptr, nullptr};
  }

  /// The oldest room of this size and pool that was given up.
  std::optional<Room> taken_over(std::size_t nbytes, const host::HostPool& pool) {
    if (device_->lost()) return std::nullopt;
    for (auto place = leaving_.begin(); place != leaving_.end(); ++place) {
      if (place->nbytes != nbytes || place->pool != &pool) continue;
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
  std::shared_ptr<host::HostPool> plain_;
  std::shared_ptr<Device> device_;
  std::unordered_map<Id, Room> rooms_;
  std::deque<Room> leaving_;
  Id last_ = 0;
  std::uint64_t handovers_ = 0;
};

}  // namespace lowpeak::copy
