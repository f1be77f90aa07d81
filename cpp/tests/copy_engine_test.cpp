// The order of copies: rule by rule, and random programs, on a device that means ill.

#include <cstdlib>
#include <cstring>
#include <memory>

#include "copy_program.hpp"
#include "copy_rig.hpp"
#include "lowpeak/copy/backends.hpp"
#include "lowpeak/copy/sim_streams.hpp"

using namespace lowpeak::copy;
using lowpeak::host::HostMemoryError;
using Sim = Rig<SimStreams>;

namespace {

constexpr std::size_t MiB = Sim::MiB;
constexpr SimMode modes[] = {SimMode::laziest, SimMode::eager, SimMode::random};

void a_copy_out_comes_after_its_source(SimMode mode, std::uint64_t seed) {
  Sim rig(2 * MiB, mode, seed);
  const auto source = rig.memory(100), target = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  rig.engine->synchronize();
  CHECK(rig.engine->done(out));
  rig.free(rig.compute, source);
  rig.engine->wait(rig.in(room, target, out), rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
}

void a_copy_in_comes_after_the_users_of_its_memory(SimMode mode, std::uint64_t seed) {
  Sim rig(2 * MiB, mode, seed);
  const auto source = rig.memory(100), target = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  rig.engine->synchronize();
  rig.fill(rig.compute, target, 1);
  rig.use(rig.compute, target, 1);
  const Ticket in = rig.in(room, target, out);
  rig.engine->synchronize();
  rig.engine->wait(in, rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
}

void a_copy_in_comes_after_its_copy_out(SimMode mode, std::uint64_t seed) {
  Sim rig(2 * MiB, mode, seed);
  const auto source = rig.memory(100), target = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  rig.fill(rig.compute, source, 7);
  rig.engine->wait(rig.in(room, target, rig.out(room, source)), rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
}

void the_user_comes_after_the_copy(SimMode mode, std::uint64_t seed) {
  Sim rig(2 * MiB, mode, seed);
  const auto source = rig.memory(100), target = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  rig.engine->wait(out, rig.compute);
  rig.free(rig.compute, source);
  rig.compute_all();
  rig.engine->wait(rig.in(room, target, out), rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
}

void a_late_copy_follows_the_stream_that_saved(SimMode mode, std::uint64_t seed) {
  Sim rig(2 * MiB, mode, seed);
  const auto source = rig.memory(100), target = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  rig.fill(rig.other, source, 7);
  rig.engine->follow(rig.compute, rig.other);
  const Ticket out = rig.out(room, source);
  rig.engine->synchronize();
  rig.engine->wait(rig.in(room, target, out), rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
}

/// A room goes on to the next while a copy in still reads it: the next copy out waits for that.
void a_room_is_handed_over(SimMode mode, std::uint64_t seed) {
  Sim rig(4 * MiB, mode, seed);
  const auto first = rig.memory(3 * MiB), second = rig.memory(3 * MiB);
  const auto back = rig.memory(3 * MiB);
  const auto room = rig.engine->allocate(3 * MiB);
  rig.fill(rig.compute, first, 7);
  const Ticket in = rig.in(room, back, rig.out(room, first));
  rig.engine->release(room);
  const auto next = rig.engine->allocate(3 * MiB);
  const auto handovers = rig.engine->statistics().handovers;
  rig.fill(rig.compute, second, 8);
  const Ticket out = rig.out(next, second);
  rig.engine->wait(out, rig.compute);
  rig.compute_all();
  rig.engine->wait(in, rig.compute);
  rig.use(rig.compute, back, 7);
  rig.engine->wait(rig.in(next, second, out), rig.compute);
  rig.use(rig.compute, second, 8);
  rig.compute_all();
  if (mode == SimMode::laziest) CHECK(handovers == 1);
}

/// Given up while its copy in runs; the pool poisons what it gets back.
void host_memory_stays_until_its_copies_ended(SimMode mode, std::uint64_t seed) {
  Sim rig(2 * MiB, mode, seed);
  const auto source = rig.memory(100), target = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  rig.fill(rig.compute, source, 7);
  const Ticket in = rig.in(room, target, rig.out(room, source));
  rig.engine->release(room);
  const auto leaving = rig.engine->statistics().leaving;
  rig.engine->wait(in, rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
  if (mode == SimMode::laziest) CHECK(leaving == 1);
  CHECK(rig.engine->statistics().leaving == 0);
  CHECK(rig.pool->statistics().pool.live == 0);
}

/// The second of two runs fails; what was queued of the first must not hit the memory's next user.
void a_copy_that_failed_half_way(SimMode mode, std::uint64_t seed) {
  Sim rig(4 * MiB, mode, seed);
  const auto source = rig.memory(3 * MiB), target = rig.memory(3 * MiB);
  rig.engine->allocate(1);  // so that the room lies in two segments
  const auto room = rig.engine->allocate(3 * MiB);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  rig.engine->fail(CopySite::copy_in, 1, 1, false);
  CHECK_THROWS(rig.in(room, target, out), CopyError);
  rig.fill(rig.compute, target, 9);
  rig.compute_all();
  rig.engine->synchronize();
  CHECK(Sim::holds(target, 9));
  CHECK(rig.engine->statistics().failures == 1);
  CHECK(rig.engine->statistics().transfers == 2);
  rig.engine->wait(rig.in(room, target, out), rig.compute);
  rig.use(rig.compute, target, 7);
  rig.compute_all();
}

void the_end_waits_for_the_copies(SimMode mode, std::uint64_t seed) {
  Sim rig(2 * MiB, mode, seed);
  const auto source = rig.memory(100), target = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  rig.fill(rig.compute, source, 7);
  const Ticket in = rig.in(room, target, rig.out(room, source));
  rig.engine.reset();
  CHECK(Sim::holds(target, 7));
  CHECK(rig.pool->statistics().pool.live == 0);
}

void done_tells_the_truth() {
  Sim rig(2 * MiB, SimMode::laziest, 0);
  const auto source = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  const Ticket out = rig.out(room, source);
  CHECK(!rig.engine->done(out));
  rig.engine->synchronize();
  CHECK(rig.engine->done(out));
}

void rooms_have_one_size() {
  Sim rig(2 * MiB, SimMode::eager, 0);
  const auto room = rig.engine->allocate(100);
  const auto memory = rig.memory(101);
  CHECK_THROWS(rig.out(room, memory), std::invalid_argument);
  rig.engine->release(room);
  CHECK_THROWS(rig.engine->release(room), std::invalid_argument);
  CHECK_THROWS(rig.engine->allocate(0), std::invalid_argument);
  CHECK_THROWS(rig.engine->allocate(3 * MiB), HostMemoryError);
}

void events_are_used_again() {
  Sim rig(2 * MiB, SimMode::random, 3);
  const auto source = rig.memory(100);
  for (int round = 0; round < 50; ++round) {
    const auto room = rig.engine->allocate(100);
    const Ticket out = rig.out(room, source);
    rig.engine->wait(rig.in(room, source, out), rig.compute);
    rig.engine->release(room);
    rig.engine->synchronize();
  }
  CHECK(rig.engine->statistics().events <= 8);
  CHECK(rig.engine->statistics().copies_out == 50);
  CHECK(rig.engine->statistics().bytes_in == 5000);
}

void the_null_backend_copies_at_once() {
  Rig<NullStreams>::Memory source(100), target(100);
  std::memset(source.bytes.data(), 7, 100);
  lowpeak::host::HostPoolOptions options;
  options.pool = {2 * MiB, 2 * MiB, 0};
  const auto pool = std::make_shared<lowpeak::host::HostPool>(
      std::make_shared<lowpeak::host::SimDriver>(), options);
  CopyEngine engine(pool, make_streams("null", 0, "", 0));
  const auto room = engine.allocate(100);
  const Ticket out = engine.copy_out(room, source.address(), 100, 0);
  CHECK(engine.done(out));
  engine.copy_in(room, target.address(), 100, 0, out);
  CHECK(target.bytes[99] == 7);
  CHECK_THROWS(make_streams("metal", 0, "", 0), std::invalid_argument);
  CHECK_THROWS(make_streams("sim", 0, "late", 0), std::invalid_argument);
}

}  // namespace

int main() {
  done_tells_the_truth();
  rooms_have_one_size();
  events_are_used_again();
  the_null_backend_copies_at_once();
  for (const SimMode mode : modes) {
    for (std::uint64_t seed = 0; seed < (mode == SimMode::random ? 20U : 1U); ++seed) {
      a_copy_out_comes_after_its_source(mode, seed);
      a_copy_in_comes_after_the_users_of_its_memory(mode, seed);
      a_copy_in_comes_after_its_copy_out(mode, seed);
      the_user_comes_after_the_copy(mode, seed);
      a_late_copy_follows_the_stream_that_saved(mode, seed);
      a_room_is_handed_over(mode, seed);
      host_memory_stays_until_its_copies_ended(mode, seed);
      a_copy_that_failed_half_way(mode, seed);
      the_end_waits_for_the_copies(mode, seed);
    }
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
      Sim rig(2 * MiB, mode, seed);
      Program<SimStreams>(rig, seed).run(80);
    }
  }
  return 0;
}
