// Plain memory behind a ring of pinned slots, copies within the computation, idle segments.

#include <memory>
#include <string>
#include <vector>

#include "copy_program.hpp"
#include "copy_rig.hpp"
#include "lowpeak/copy/sim_streams.hpp"

using namespace lowpeak::copy;
using lowpeak::host::HostMemoryError;
using Sim = Rig<SimStreams>;

namespace {

constexpr std::size_t KiB = Sim::KiB;
constexpr std::size_t MiB = Sim::MiB;
constexpr SimMode modes[] = {SimMode::laziest, SimMode::eager, SimMode::random};

/// A rig whose ring has four slots of 64 KiB: a value of nine and a bit goes round it twice.
struct Small : Sim {
  Small(SimMode mode, std::uint64_t seed) : Sim(8 * MiB, mode, seed) {
    taken = engine->allocate(MiB);
    engine->release(engine->allocate_plain(1));
    CHECK(engine->statistics().ring_bytes == 256 * KiB);
  }
  static constexpr std::size_t size = 9 * 64 * KiB + 100;
  Rooms::Id taken;
};

/// Values that follow each other through the ring, out and back, over memory that is used again.
void values_go_round(SimMode mode, std::uint64_t seed) {
  Small rig(mode, seed);
  const auto memory = rig.memory(Small::size), back = rig.memory(Small::size);
  std::vector<Rooms::Id> rooms;
  std::vector<Ticket> ends;
  for (unsigned char value = 1; value <= 3; ++value) {
    rooms.push_back(rig.engine->allocate_plain(Small::size));
    rig.fill(rig.compute, memory, value);
    ends.push_back(rig.out(rooms.back(), memory));
    rig.engine->wait(ends.back(), rig.compute);
    rig.free(rig.compute, memory);
  }
  for (unsigned char value = 3; value >= 1; --value) {
    const std::size_t place = value - 1U;
    rig.engine->wait(rig.in(rooms[place], back, ends[place]), rig.compute);
    rig.use(rig.compute, back, value);
    rig.engine->release(rooms[place]);
  }
  rig.compute_all();
  rig.engine->synchronize();
  const CopyStatistics statistics = rig.engine->statistics();
  CHECK(statistics.plain_bytes_out == 3 * Small::size);
  CHECK(statistics.plain_bytes_in == 3 * Small::size);
  CHECK(statistics.plain_live_bytes == 0 && statistics.leaving == 0);
}

/// A slot that a copy back still reads is not written by the next copy out, nor the other way.
void both_directions_share_the_ring(SimMode mode, std::uint64_t seed) {
  Small rig(mode, seed);
  const auto first = rig.memory(Small::size), second = rig.memory(Small::size);
  const auto one = rig.memory(Small::size), two = rig.memory(Small::size);
  const auto a = rig.engine->allocate_plain(Small::size);
  const auto b = rig.engine->allocate_plain(Small::size);
  rig.fill(rig.compute, first, 7);
  rig.fill(rig.compute, second, 8);
  const Ticket out = rig.out(a, first);
  rig.engine->wait(out, rig.compute);
  const Ticket back = rig.in(a, one, out);
  const Ticket other = rig.out(b, second);
  const Ticket back_too = rig.in(b, two, other);
  rig.engine->wait(back_too, rig.compute);
  rig.use(rig.compute, two, 8);
  rig.engine->wait(back, rig.compute);
  rig.use(rig.compute, one, 7);
  rig.compute_all();
}

/// The third piece fails: what was queued of the others must not hit the memory's next user, and
/// the ring serves the next copy.
void a_piece_fails(SimMode mode, std::uint64_t seed, CopySite site) {
  Small rig(mode, seed);
  const auto source = rig.memory(Small::size), target = rig.memory(Small::size);
  const auto room = rig.engine->allocate_plain(Small::size);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  rig.engine->fail(site, 2, 1, false);
  CHECK_THROWS(rig.in(room, target, out), CopyError);
  rig.fill(rig.compute, target, 9);
  rig.compute_all();
  rig.engine->synchronize();
  CHECK(Sim::holds(target, 9));
  rig.engine->wait(rig.in(room, target, out), rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
}

/// Each way out when the one before is closed; every step's values are right.
void the_ladder() {
  Sim rig(16 * MiB, SimMode::laziest, 0);
  using lowpeak::host::Site;
  const auto source = rig.memory(3 * MiB);
  const auto there_and_back = [&](Rooms::Id room, unsigned char value) {
    rig.fill(rig.compute, source, value);
    const Ticket out = rig.out(room, source);
    rig.engine->wait(out, rig.compute);
    rig.free(rig.compute, source);
    rig.engine->wait(rig.in(room, source, out), rig.compute);
    rig.use(rig.compute, source, value);
    rig.compute_all();
  };
  const auto close_the_driver = [&](std::uint64_t times) {
    rig.pool->fail(Site::register_host, 0, times);
    rig.pool->fail(Site::allocate_host, 0, times);
  };
  const auto pinned = rig.engine->allocate(3 * MiB);
  there_and_back(pinned, 1);
  close_the_driver(1000);
  CHECK_THROWS(rig.engine->allocate(3 * MiB), HostMemoryError);
  const auto plain = rig.engine->allocate_plain(3 * MiB);
  there_and_back(plain, 2);
  CHECK(rig.engine->statistics().plain_bytes_in == 3 * MiB);
  CHECK(rig.pool->statistics().pool.reserved == 4 * MiB);
  // 4 of 16 MiB are pinned and 4 plain: 12 do not fit, before the pinned ones are trimmed too.
  std::string text;
  try {
    rig.engine->allocate_plain(12 * MiB);
  } catch (const HostMemoryError& error) {
    text = error.what();
  }
  for (const char* part : {"12.00 MiB", "budget is 16.00 MiB (limit_bytes)", "are reserved",
                           "are available (", "in use"}) {
    CHECK(text.find(part) != std::string::npos);
  }
  close_the_driver(0);
  const auto again = rig.engine->allocate(3 * MiB);
  there_and_back(again, 3);
  // Plain segments that nobody uses make room for pinned ones.
  rig.engine->release(plain);
  rig.engine->synchronize();
  CHECK(rig.engine->statistics().plain_reserved_bytes == 4 * MiB);
  there_and_back(rig.engine->allocate(3 * MiB), 4);
  rig.engine->release(rig.engine->allocate(3 * MiB));
  CHECK(rig.engine->statistics().plain_reserved_bytes == 0);
}

/// The ring that is made early takes a sixty-fourth of what there is.
void an_early_ring_is_small() {
  Sim rig(300 * MiB, SimMode::laziest, 0);
  rig.engine->allocate(15 * MiB);
  rig.engine->allocate(64 * KiB - 1);
  CHECK(rig.pool->statistics().pool.reserved == 16 * MiB);
  CHECK(rig.engine->reserve_ring() && rig.engine->reserve_ring());
  CHECK(rig.engine->statistics().ring_bytes == 256 * KiB);
  Sim smaller(300 * MiB, SimMode::laziest, 0);
  smaller.engine->allocate(13 * MiB);
  CHECK(!smaller.engine->reserve_ring());
  Sim larger(300 * MiB, SimMode::laziest, 0);
  larger.engine->release(larger.engine->allocate(256 * MiB));
  CHECK(larger.engine->reserve_ring());
  CHECK(larger.engine->statistics().ring_bytes == 4 * MiB);
}

/// Without pinned memory for the ring there is no way to plain memory either.
void no_ring() {
  Sim rig(32 * MiB, SimMode::laziest, 0);
  rig.pool->fail(lowpeak::host::Site::register_host, 0, 1000);
  rig.pool->fail(lowpeak::host::Site::allocate_host, 0, 1000);
  rig.engine->fail(CopySite::create_stream, 0, 1, false);
  CHECK_THROWS(rig.engine->allocate_plain(100), HostMemoryError);
  CHECK_THROWS(rig.engine->allocate_plain(100), HostMemoryError);
  CHECK(!rig.engine->reserve_ring());
  rig.pool->fail(lowpeak::host::Site::register_host, 0, 0);
  static_cast<void>(rig.engine->allocate_plain(100));
  CHECK(rig.engine->statistics().ring_bytes == 4 * MiB);
}

/// Copies on the computation's own streams; the last reader of a room does not stand for a reader
/// on another stream by itself.
void within_the_computation(SimMode mode, std::uint64_t seed) {
  Sim rig(4 * MiB, mode, seed);
  rig.within();
  const auto source = rig.memory(3 * MiB), next = rig.memory(3 * MiB);
  const auto one = rig.memory(3 * MiB), two = rig.memory(3 * MiB);
  const auto room = rig.engine->allocate(3 * MiB);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  rig.free(rig.compute, source);  // the same stream: nothing to wait for
  const Ticket early = rig.in_on(rig.other, room, one, out);
  const Ticket late = rig.in(room, two, out);
  rig.engine->release(room);
  const auto taken_over = rig.engine->allocate(3 * MiB);
  rig.fill(rig.compute, next, 8);
  const Ticket over = rig.out(taken_over, next);
  rig.use(rig.compute, two, 7);
  CHECK(rig.streams->synchronize_stream(rig.compute).ok);
  rig.use(rig.other, one, 7);
  rig.engine->synchronize();
  CHECK(rig.engine->done(early) && rig.engine->done(late) && rig.engine->done(over));
  rig.compute_all();
}

/// A room is given up before anybody read it, and written again by another stream.
void written_twice_within_the_computation(SimMode mode, std::uint64_t seed) {
  Sim rig(4 * MiB, mode, seed);
  rig.within();
  const auto first = rig.memory(3 * MiB), second = rig.memory(3 * MiB);
  const auto room = rig.engine->allocate(3 * MiB);
  rig.fill(rig.other, first, 7);
  rig.engine->copy_out(room, first->address(), 3 * MiB, rig.other);
  rig.engine->release(room);
  const auto again = rig.engine->allocate(3 * MiB);
  rig.fill(rig.compute, second, 8);
  const Ticket out = rig.out(again, second);
  CHECK(rig.streams->synchronize_stream(rig.compute).ok);
  CHECK(rig.streams->synchronize_stream(rig.other).ok);
  rig.engine->wait(rig.in(again, second, out), rig.compute);
  rig.use(rig.compute, second, 8);
  rig.compute_all();
}

/// A segment stays while copies use it, however many steps go by.
void idle_segments_wait_for_their_copies() {
  Sim rig(16 * MiB, SimMode::laziest, 0);
  const auto source = rig.memory(3 * MiB), target = rig.memory(3 * MiB);
  const auto room = rig.engine->allocate(3 * MiB);
  rig.fill(rig.compute, source, 7);
  const Ticket in = rig.in(room, target, rig.out(room, source));
  rig.engine->release(room);
  for (int step = 0; step < 9; ++step) rig.engine->begin_step(2);
  CHECK(rig.pool->statistics().pool.reserved == 4 * MiB);
  rig.engine->wait(in, rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
  for (int step = 0; step < 4; ++step) rig.engine->begin_step(2);
  CHECK(rig.pool->statistics().pool.reserved == 0);
  CHECK(rig.pool->statistics().pool.idle_segments == 1);
}

}  // namespace

int main() {
  the_ladder();
  an_early_ring_is_small();
  no_ring();
  idle_segments_wait_for_their_copies();
  for (const SimMode mode : modes) {
    for (std::uint64_t seed = 0; seed < (mode == SimMode::random ? 20U : 1U); ++seed) {
      values_go_round(mode, seed);
      both_directions_share_the_ring(mode, seed);
      a_piece_fails(mode, seed, CopySite::copy_in);
      a_piece_fails(mode, seed, CopySite::run_on_host);
      within_the_computation(mode, seed);
      written_twice_within_the_computation(mode, seed);
    }
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      Small rig(mode, seed);
      rig.engine->release(rig.taken);
      Program<SimStreams>(rig, seed, true).run(80);
      rig.within();
      Program<SimStreams>(rig, seed, true).run(40);
    }
  }
  return 0;
}
