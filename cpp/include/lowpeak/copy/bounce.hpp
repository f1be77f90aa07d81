#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lowpeak/copy/device.hpp"
#include "lowpeak/copy/order.hpp"
#include "lowpeak/copy/waits.hpp"
#include "lowpeak/host/error.hpp"
#include "lowpeak/host/host_pool.hpp"

namespace lowpeak::copy {

/// @brief The two streams that a copy of plain memory runs on: transfers, and what the host copies.
struct Lanes {
  Stream device;
  Stream host;
};

/// @brief Copies between a device and plain memory, through a ring of pinned slots.
///
/// A device copies to and from plain memory by blocking the thread that asks for it. So each piece
/// goes through a slot: one stream transfers it, another has a thread of the driver copy it on.
/// Both are ordered by events, as all copies are, and nothing blocks.
///
/// Not synchronised.
class Bounce {
 public:
  static constexpr std::size_t number_of_slots = 4;

  Bounce(std::shared_ptr<host::HostPool> pool, std::shared_ptr<Device> device, Order order)
      : pool_(std::move(pool)), device_(std::move(device)), order_(std::move(order)) {}

  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;
  /// Gives the ring back; no copy may run any more.
  ~Bounce() {
    if (ready()) pool_->release(record_);
    for (const Stream stream : {out_, in_}) {
      if (stream != 0) device_->destroy_stream(stream);
    }
  }

  bool ready() const noexcept { return slot_bytes_ > 0; }

  /// Pinned bytes of the ring.
  std::size_t nbytes() const noexcept { return number_of_slots * slot_bytes_; }

  /// Makes the ring of what the pool has free, if that is a small part of it; whether there is one.
  ///
  /// Best done early: when pinned memory is refused, all that there is may be in use.
  bool reserve() {
    if (ready()) return true;
    const std::size_t part = pool_->statistics().pool.reserved / 64;
    return (most <= part / number_of_slots && take(most, false)) ||
           (least <= part / number_of_slots && take(least, false));
  }

  /// Makes the ring, by a further segment where it must be.
  /// @throws host::HostMemoryError where not even the least is to be had, or no stream
  void prepare() {
    make_streams();
    if (ready() || take(most, false) || take(least, false) || take(most, true)) return;
    allocate(least, true);
  }

  Stream out() const noexcept { return out_; }
  Stream in() const noexcept { return in_; }

  /// Queues the copy of `runs` from the device.
  void copy_out(const std::vector<host::Run>& runs, std::uintptr_t source, const Lanes& lanes) {
    in_pieces(runs, [&](Slot& slot, std::byte* plain, std::size_t nbytes) {
      order_.after(lanes.device, slot.used, Wait::out_for_slot);
      device_->copy_out(slot.data, source, nbytes, lanes.device);
      order_.streams(lanes.host, lanes.device, Wait::host_for_slot);
      on_host(plain, slot.data, nbytes, lanes.host);
      slot.used = order_.end_of(lanes.host);
      source += nbytes;
    });
  }

  /// Queues the copy of `runs` to the device.
  void copy_in(const std::vector<host::Run>& runs, std::uintptr_t target, const Lanes& lanes) {
    in_pieces(runs, [&](Slot& slot, const std::byte* plain, std::size_t nbytes) {
      order_.after(lanes.host, slot.used, Wait::in_for_slot);
      on_host(slot.data, plain, nbytes, lanes.host);
      order_.streams(lanes.device, lanes.host, Wait::device_for_slot);
      device_->copy_in(target, slot.data, nbytes, lanes.device);
      slot.used = order_.end_of(lanes.device);
      target += nbytes;
    });
  }

  /// After a copy that failed half way: all slots are in use until the other half has ended.
  void used_until(const Ticket& end) {
    for (Slot& slot : slots_) slot.used = end;
  }

 private:
  struct Slot {
    std::byte* data = nullptr;
    Ticket used;  ///< The end of what used it last.
  };

  /// Bytes of a slot: one thread copies 1 MiB in many times what it takes to queue the copy.
  static constexpr std::size_t most = std::size_t{1} << 20;
  static constexpr std::size_t least = host::ExtentPool::granule;

  bool take(std::size_t slot_bytes, bool may_grow) {
    try {
      allocate(slot_bytes, may_grow);
      return true;
    } catch (const host::HostMemoryError&) {
      return false;
    }
  }

  void allocate(std::size_t slot_bytes, bool may_grow) {
    record_ = pool_->allocate_block(number_of_slots * slot_bytes, may_grow);
    slot_bytes_ = slot_bytes;
    std::byte* data = pool_->runs(record_).front().data;
    for (Slot& slot : slots_) slot.data = std::exchange(data, data + slot_bytes);
  }

  template <typename Copy>
  void in_pieces(const std::vector<host::Run>& runs, Copy copy) {
    for (const host::Run& run : runs) {
      for (std::size_t begin = 0; begin < run.nbytes; begin += slot_bytes_) {
        Slot& slot = slots_[next_];
        next_ = (next_ + 1) % number_of_slots;
        copy(slot, run.data + begin, std::min(slot_bytes_, run.nbytes - begin));
      }
    }
  }

  void on_host(std::byte* target, const std::byte* source, std::size_t nbytes, Stream stream) {
    device_->run_on_host([=] { std::memcpy(target, source, nbytes); }, stream);
  }

  void make_streams() {
    if (!device_->runs_on_host()) {
      throw host::HostMemoryError(
          "no way to plain memory: the driver runs no functions of the host");
    }
    try {
      if (out_ == 0) out_ = device_->create_stream();
      if (in_ == 0) in_ = device_->create_stream();
    } catch (const CopyError& error) {
      throw host::HostMemoryError(std::string("no way to plain memory: ") + error.what());
    }
  }

  std::shared_ptr<host::HostPool> pool_;
  std::shared_ptr<Device> device_;
  Order order_;
  host::HostPool::Id record_ = 0;
  std::size_t slot_bytes_ = 0;
  std::array<Slot, number_of_slots> slots_;
  std::size_t next_ = 0;
  Stream out_ = 0;
  Stream in_ = 0;
};

}  // namespace lowpeak::copy
