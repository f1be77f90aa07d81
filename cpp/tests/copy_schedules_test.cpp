// Every schedule of small programs with a few steps ahead of need: not one wrong byte.

#include <cstddef>
#include <cstdio>
#include <functional>
#include <vector>

#include "copy_rig.hpp"
#include "lowpeak/copy/sim_streams.hpp"

using namespace lowpeak::copy;
using Sim = Rig<SimStreams>;

namespace {

/// Goes through all sequences of choices, depth first.
///
/// The device does `most_moves` things of its own accord, at any moments, and the rest when
/// something waits for them.
class Schedules {
 public:
  explicit Schedules(std::size_t most_moves) : most_moves_(most_moves) {}

  /// Begins the next sequence; false when there is none.
  bool next() {
    while (!made_.empty() && made_.back().taken == made_.back().last) made_.pop_back();
    if (made_.empty() && begun_) return false;
    if (!made_.empty()) ++made_.back().taken;
    begun_ = true;
    place_ = moves_ = 0;
    return true;
  }

  std::size_t choose(std::size_t count) {
    if (moves_ == most_moves_) return count;
    if (place_ == made_.size()) made_.push_back({0, count});
    const std::size_t taken = made_[place_++].taken;
    if (taken < count) ++moves_;
    return taken;
  }

 private:
  struct Taken {
    std::size_t taken;
    std::size_t last;
  };
  const std::size_t most_moves_;
  std::vector<Taken> made_;
  std::size_t place_ = 0;
  std::size_t moves_ = 0;
  bool begun_ = false;
};

using Program = std::function<void(Sim&)>;

void every_schedule(const char* name, std::size_t moves, const Program& program) {
  Schedules schedules(moves);
  const auto pool = Sim::make_pool(2 * Sim::MiB);
  std::size_t number = 0;
  while (schedules.next()) {
    Sim rig(pool, Choice([&](std::size_t count) { return schedules.choose(count); }));
    program(rig);
    rig.compute_all();
    rig.engine.reset();
    CHECK(pool->statistics().pool.live == 0);
    ++number;
  }
  std::printf("%s: %zu schedules\n", name, number);
  CHECK(number > 2000);
}

constexpr std::size_t size = 256;

/// Out, its memory given back, and in again over memory that is in use until then.
void there_and_back(Sim& rig) {
  const auto source = rig.memory(size);
  const auto room = rig.engine->allocate(size);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  rig.engine->wait(out, rig.compute);
  rig.free(rig.compute, source);
  rig.use(rig.compute, source, 0xCB);
  const Ticket in = rig.in(room, source, out);
  rig.engine->wait(in, rig.compute);
  rig.use(rig.compute, source, 7);
}

/// In again over memory that the computation still uses.
void over_memory_in_use(Sim& rig) {
  const auto source = rig.memory(size), target = rig.memory(size);
  const auto room = rig.engine->allocate(size);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  rig.engine->synchronize();
  rig.fill(rig.compute, target, 8);
  rig.use(rig.compute, target, 8);
  rig.engine->wait(rig.in(room, target, out), rig.compute);
  rig.use(rig.compute, target, 7);
}

/// Given up with its copies on the way, its source as soon as the copy has ended.
void dropped(Sim& rig) {
  const auto source = rig.memory(size), target = rig.memory(size);
  const auto room = rig.engine->allocate(size);
  rig.fill(rig.compute, source, 7);
  const Ticket out = rig.out(room, source);
  const Ticket in = rig.in(room, target, out);
  rig.engine->release(room);
  if (rig.engine->done(out)) rig.free(rig.compute, source);
  rig.engine->wait(in, rig.compute);
  rig.use(rig.compute, target, 7);
}

/// Handed over: the pool has room for one only.
void handed_over(Sim& rig) {
  const auto others = rig.engine->allocate(2 * Sim::MiB - 64 * Sim::KiB);
  const auto first = rig.memory(size), second = rig.memory(size), back = rig.memory(size);
  const auto room = rig.engine->allocate(size);
  rig.fill(rig.compute, first, 7);
  const Ticket in = rig.in(room, back, rig.out(room, first));
  rig.engine->release(room);
  const auto next = rig.engine->allocate(size);
  const Ticket out = rig.out(next, second);
  rig.engine->wait(in, rig.compute);
  rig.use(rig.compute, back, 7);
  rig.engine->wait(rig.in(next, back, out), rig.compute);
  rig.use(rig.compute, back, 0xEE);
  rig.engine->release(next);
  rig.engine->release(others);
}

}  // namespace

int main() {
  every_schedule("there and back", 5, there_and_back);
  every_schedule("over memory in use", 5, over_memory_in_use);
  every_schedule("dropped", 5, dropped);
  every_schedule("handed over", 3, handed_over);
  return 0;
}
