// Threads, forks, the end of the process.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "copy_program.hpp"
#include "copy_rig.hpp"
#include "lowpeak/copy/null_streams.hpp"
#include "lowpeak/copy/sim_streams.hpp"
#include "lowpeak/copy/threaded_streams.hpp"

using namespace lowpeak::copy;
using Sim = Rig<SimStreams>;
using Threaded = Rig<ThreadedStreams>;

namespace {

constexpr std::size_t MiB = Sim::MiB;

/// Runs `action` in a forked child; the child's exit status.
template <typename Action>
int in_child(Action action) {
  std::fflush(nullptr);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    action();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

/// Random programs on streams that are threads.
void programs_on_threaded_streams() {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    Threaded rig(16 * MiB, seed);
    if (seed % 3 == 2) rig.within();
    Program<ThreadedStreams>(rig, seed, seed % 2 == 1).run(60);
  }
}

/// Host threads that share an engine, each with values of its own.
void threads_share_an_engine() {
  Threaded rig(8 * MiB, std::uint64_t{1});
  std::vector<std::thread> workers;
  for (unsigned char value = 1; value <= 3; ++value) {
    workers.emplace_back([&rig, value] {
      Stream compute = 0;
      CHECK(rig.streams->create_stream(&compute).ok);
      for (int round = 0; round < 30; ++round) {
        const auto source = rig.memory(1000), target = rig.memory(1000);
        const auto room = rig.engine->allocate(1000);
        rig.fill(compute, source, value);
        const Ticket out = rig.engine->copy_out(room, source->address(), 1000, compute);
        rig.engine->wait(out, compute);
        rig.free(compute, source);
        const Ticket in = rig.engine->copy_in(room, target->address(), 1000, compute, out);
        rig.engine->release(room);
        rig.engine->wait(in, compute);
        rig.use(compute, target, value);
        if (round % 10 == 0) rig.engine->synchronize();
        if (round % 7 == 0) static_cast<void>(rig.engine->statistics());
      }
      CHECK(rig.streams->synchronize_stream(compute).ok);
    });
  }
  for (std::thread& worker : workers) worker.join();
  rig.engine->synchronize();
  CHECK(rig.pool->statistics().pool.live == 0);
}

void a_child_may_not_use_its_parents_engine() {
  Sim rig(2 * MiB, SimMode::laziest, 0);
  const auto memory = rig.memory(100);
  const auto room = rig.engine->allocate(100);
  Ticket out = rig.out(room, memory);
  const int status = in_child([&] {
    using lowpeak::host::ForkedError;
    CHECK_THROWS(rig.engine->allocate(1), ForkedError);
    CHECK_THROWS(rig.out(room, memory), ForkedError);
    CHECK_THROWS(rig.in(room, memory, out), ForkedError);
    CHECK_THROWS(rig.engine->done(out), ForkedError);
    CHECK_THROWS(rig.engine->wait(out, 0), ForkedError);
    CHECK_THROWS(rig.engine->follow(rig.compute, rig.other), ForkedError);
    CHECK_THROWS(rig.engine->synchronize(), ForkedError);
    CHECK_THROWS(rig.engine->statistics(), ForkedError);
    rig.engine->release(room);
    out.reset();
    rig.engine.reset();
    rig.pool.reset();
  });
  CHECK(status == 0);
  rig.engine->synchronize();
  CHECK(rig.engine->done(out));
}

/// A driver that ends the process when it is asked for anything at the end.
class Departed final : public StreamDriver {
 public:
  const char* name() const noexcept override { return "departed"; }
  Outcome create_stream(Stream*) override { return {}; }
  Outcome destroy_stream(Stream) override { _exit(2); }
  Outcome synchronize_stream(Stream) override { _exit(2); }
  Outcome create_event(Event*) override { return {}; }
  Outcome destroy_event(Event) override { _exit(2); }
  Outcome record(Event, Stream) override { return {}; }
  Outcome wait(Stream, Event) override { return {}; }
  Outcome query(Event, bool*) override { _exit(2); }
  Outcome synchronize_event(Event) override { _exit(2); }
  Outcome copy_out(std::byte*, std::uintptr_t, std::size_t, Stream) override { return {}; }
  Outcome copy_in(std::uintptr_t, const std::byte*, std::size_t, Stream) override { return {}; }
  Outcome run_on_host(std::function<void()>, Stream) override { return {}; }
};

/// Destroyed by exit(), when the driver may be gone.
std::unique_ptr<CopyEngine> until_the_end;

std::unique_ptr<CopyEngine> of_departed_driver() {
  lowpeak::host::HostPoolOptions options;
  options.pool = {2 * MiB, 2 * MiB, 0};
  auto pool = std::make_shared<lowpeak::host::HostPool>(
      std::make_shared<lowpeak::host::SimDriver>(), options);
  return std::make_unique<CopyEngine>(pool, std::make_shared<Departed>());
}

void the_end_of_the_process_calls_no_driver() {
  const int at_exit = in_child([] {
    until_the_end = of_departed_driver();
    static const Ticket out =
        until_the_end->copy_out(until_the_end->allocate(100), std::uintptr_t{1}, 100, 0);
    std::exit(0);
  });
  CHECK(at_exit == 0);
  const int when_python_ends = in_child([] {
    auto engine = of_departed_driver();
    const auto room = engine->allocate(100);
    Ticket out = engine->copy_out(room, std::uintptr_t{1}, 100, 0);
    lowpeak::host::ProcessGuard::begin_exit();
    engine->release(room);
    out.reset();
    engine.reset();
  });
  CHECK(when_python_ends == 0);
}

}  // namespace

int main() {
  a_child_may_not_use_its_parents_engine();
  the_end_of_the_process_calls_no_driver();
  programs_on_threaded_streams();
  threads_share_an_engine();
  return 0;
}
