#pragma once

#include <deque>
#include <random>
#include <utility>
#include <vector>

#include "copy_rig.hpp"

/// A random program as activation offload runs it: values leave, their memory is given back, they
/// return, twice perhaps, and are dropped at any moment.
template <typename Streams>
class Program {
 public:
  using TheRig = Rig<Streams>;

  /// @param plain  Half of the values go to plain memory.
  Program(TheRig& rig, std::uint64_t seed, bool plain = false)
      : rig_(rig), random_(seed), plain_(plain) {}

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      switch (random_() % 6) {
        case 0:
        case 1:
          save();
          break;
        case 2:
          retire();
          break;
        case 3:
        case 4:
          reload();
          break;
        default:
          drop();
      }
    }
    while (!saved_.empty()) drop();
    rig_.compute_all();
    rig_.engine->synchronize();
    const auto statistics = rig_.engine->statistics();
    CHECK(rig_.pool->statistics().pool.live == statistics.ring_bytes);
    CHECK(statistics.plain_live_bytes == 0);
  }

 private:
  struct Saved {
    unsigned char value;
    std::shared_ptr<typename TheRig::Memory> source;  ///< Until it is given back.
    lowpeak::copy::Rooms::Id room;
    lowpeak::copy::Ticket ticket;
    std::size_t nbytes;
  };

  void save() {
    const std::size_t nbytes = (random_() % 3 == 0 ? 192 : 128) * TheRig::KiB;
    lowpeak::copy::Rooms::Id room = 0;
    try {
      const bool plain = plain_ && random_() % 2 == 0;
      room = plain ? rig_.engine->allocate_plain(nbytes) : rig_.engine->allocate(nbytes);
    } catch (const lowpeak::host::HostMemoryError&) {
      drop();
      return;
    }
    const auto value = static_cast<unsigned char>(1 + random_() % 200);
    auto source = memory(nbytes);
    if (random_() % 4 == 0) {
      // Computed on another stream, which may first use the memory when this one is through.
      rig_.engine->follow(rig_.other, rig_.compute);
      rig_.fill(rig_.other, source, value);
      rig_.engine->follow(rig_.compute, rig_.other);
    } else {
      rig_.fill(rig_.compute, source, value);
    }
    auto ticket = rig_.out(room, source);
    saved_.push_back({value, std::move(source), room, std::move(ticket), nbytes});
  }

  void retire() {
    if (!saved_.empty()) give_back(saved_[random_() % saved_.size()]);
  }

  void give_back(Saved& saved) {
    if (saved.source == nullptr) return;
    if (!rig_.engine->done(saved.ticket)) rig_.engine->wait(saved.ticket, rig_.compute);
    free(std::move(saved.source));
  }

  void reload() {
    if (saved_.empty()) return;
    const Saved& saved = saved_[random_() % saved_.size()];
    const unsigned char value = saved.value;
    auto target = memory(saved.nbytes);
    const auto ticket = rig_.in(saved.room, target, saved.ticket);
    // The room may go while the copy still reads it.
    if (random_() % 8 == 0) drop();
    rig_.engine->wait(ticket, rig_.compute);
    rig_.use(rig_.compute, target, value);
    free(std::move(target));
  }

  void drop() {
    if (saved_.empty()) return;
    give_back(saved_.front());
    rig_.engine->release(saved_.front().room);
    saved_.pop_front();
  }

  std::shared_ptr<typename TheRig::Memory> memory(std::size_t nbytes) {
    for (auto place = idle_.begin(); place != idle_.end(); ++place) {
      if ((*place)->bytes.size() != nbytes) continue;
      auto result = std::move(*place);
      idle_.erase(place);
      return result;
    }
    return rig_.memory(nbytes);
  }

  void free(std::shared_ptr<typename TheRig::Memory> memory) {
    rig_.free(rig_.compute, memory);
    idle_.push_back(std::move(memory));
  }

  TheRig& rig_;
  std::mt19937_64 random_;
  bool plain_;
  std::deque<Saved> saved_;
  std::vector<std::shared_ptr<typename TheRig::Memory>> idle_;
};
