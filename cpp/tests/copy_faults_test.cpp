// Injected failures: each step ends right or in an error, and the next step is right.

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "copy_rig.hpp"
#include "lowpeak/copy/sim_streams.hpp"

using namespace lowpeak::copy;
using lowpeak::host::HostMemoryError;
using Sim = Rig<SimStreams>;

namespace {

constexpr std::size_t MiB = Sim::MiB;
constexpr std::size_t size = 70 * Sim::KiB;

struct Tally {
  int steps_right = 0;
  int in_plain_memory = 0;
  int kept_on_device = 0;
  int errors = 0;
  int engines_lost = 0;
};

struct Saved {
  unsigned char value;
  Sim::Shared source;
  std::optional<Rooms::Id> room;
  Ticket out;
};

/// What a finaliser does with a value that nobody wants any more: never an exception.
void clear(Sim& rig, Saved& saved) {
  if (!saved.room) return;
  try {
    if (saved.source != nullptr && saved.out != nullptr) rig.engine->wait(saved.out, rig.compute);
  } catch (const CopyError&) {
    // The computation cannot be told to wait: the memory is not given back.
    saved.source = nullptr;
  }
  if (saved.source != nullptr) rig.free(rig.compute, saved.source);
  rig.engine->release(*saved.room);
}

void save(Sim& rig, Saved& saved, Tally& tally) {
  rig.fill(rig.compute, saved.source, saved.value);
  try {
    saved.room = rig.engine->allocate(size);
  } catch (const HostMemoryError&) {
    try {
      saved.room = rig.engine->allocate_plain(size);
      ++tally.in_plain_memory;
    } catch (const HostMemoryError&) {
      ++tally.kept_on_device;  // the value stays where it is
      return;
    }
  }
  try {
    saved.out = rig.out(*saved.room, saved.source);
  } catch (const CopyError&) {
    rig.free(rig.compute, saved.source);
    saved.source = nullptr;
    throw;
  }
  if (!rig.engine->done(saved.out)) rig.engine->wait(saved.out, rig.compute);
  rig.free(rig.compute, saved.source);
  saved.source = nullptr;
}

void restore(Sim& rig, const Saved& saved) {
  if (saved.source != nullptr) {
    rig.use(rig.compute, saved.source, saved.value);
    return;
  }
  const auto target = rig.memory(size);
  Ticket in;
  try {
    in = rig.in(*saved.room, target, saved.out);
  } catch (const CopyError&) {
    // The memory goes to somebody else.
    rig.fill(rig.compute, target, 99);
    rig.use(rig.compute, target, 99);
    throw;
  }
  // Where the order fails the memory is lost to everybody, as it is with torch's streams.
  rig.engine->wait(in, rig.compute);
  rig.use(rig.compute, target, saved.value);
  rig.free(rig.compute, target);
}

/// A forward and a backward of three values. Whether they ended without an error.
bool step(Sim& rig, Tally& tally) {
  std::vector<Saved> all;
  bool right = true;
  for (unsigned char value = 1; value <= 3; ++value) {
    all.push_back({value, rig.memory(size), std::nullopt, nullptr});
  }
  try {
    for (Saved& saved : all) save(rig, saved, tally);
    for (auto saved = all.rbegin(); saved != all.rend(); ++saved) restore(rig, *saved);
    rig.engine->synchronize();
  } catch (const CopyError& error) {
    CHECK(std::string(error.what()).find("injected") != std::string::npos);
    right = false;
  }
  for (Saved& saved : all) clear(rig, saved);
  rig.compute_all();
  return right;
}

void inject(Sim& rig, std::mt19937_64& random, bool loses) {
  const auto skip = random() % 6, times = 1 + random() % 3;
  if (random() % 4 == 0) {
    using lowpeak::host::Site;
    for (const Site site : {Site::map, Site::register_host, Site::allocate_host}) {
      rig.pool->fail(site, 0, random() % 8);
    }
    rig.pool->trim(0);
  }
  rig.engine->fail(static_cast<CopySite>(random() % copy_site_names.size()), skip, times, loses);
}

void repair(Sim& rig) {
  using lowpeak::host::Site;
  for (const Site site : {Site::map, Site::register_host, Site::allocate_host}) {
    rig.pool->fail(site, 0, 0);
  }
  for (std::size_t site = 0; site < copy_site_names.size(); ++site) {
    rig.engine->fail(static_cast<CopySite>(site), 0, 0, false);
  }
}

std::unique_ptr<Sim> fresh(SimMode mode, std::uint64_t seed) {
  return std::make_unique<Sim>(8 * MiB, mode, seed);
}

void failures_at_random(int rounds) {
  constexpr SimMode modes[] = {SimMode::laziest, SimMode::eager, SimMode::random};
  std::mt19937_64 random(1);
  Tally tally;
  auto rig = fresh(SimMode::random, 1);
  for (int round = 0; round < rounds; ++round) {
    const bool loses = random() % 64 == 0;
    inject(*rig, random, loses);
    ++(step(*rig, tally) ? tally.steps_right : tally.errors);
    repair(*rig);
    bool lost = false;
    try {
      rig->engine->synchronize();
    } catch (const CopyError&) {
      lost = true;
      ++tally.engines_lost;
    }
    if (lost || round % 20 == 0) {
      rig = fresh(modes[random() % 3], random());
      if (random() % 4 == 0) rig->within();
    }
    CHECK(step(*rig, tally));
    rig->engine->synchronize();
    const CopyStatistics statistics = rig->engine->statistics();
    CHECK(statistics.leaving == 0 && statistics.plain_live_bytes == 0);
    CHECK(rig->pool->statistics().pool.live == statistics.ring_bytes);
  }
  std::printf("%d right, %d errors, %d in plain memory, %d kept on the device, %d engines lost\n",
              tally.steps_right, tally.errors, tally.in_plain_memory, tally.kept_on_device,
              tally.engines_lost);
  CHECK(tally.steps_right > rounds / 20 && tally.errors > rounds / 4);
  CHECK(tally.kept_on_device > 0 && tally.engines_lost > 0 && tally.in_plain_memory > 0);
}

void a_lost_device_is_left_alone() {
  Sim rig(2 * MiB, SimMode::laziest, 0);
  const auto memory = rig.memory(size);
  const auto room = rig.engine->allocate(size);
  const Ticket out = rig.out(room, memory);
  rig.engine->fail(CopySite::query, 0, 1, true);
  CHECK_THROWS(rig.engine->done(out), CopyError);
  try {
    rig.engine->done(out);
    CHECK(false);
  } catch (const CopyError& error) {
    CHECK(std::string(error.what()) == "the device was lost before: query failed: injected");
  }
  CHECK_THROWS(rig.engine->synchronize(), CopyError);
  rig.engine->release(room);
  CHECK(rig.pool->statistics().pool.live == size);
  rig.engine.reset();
  // Copies may still run: their memory stays.
  CHECK(rig.pool->statistics().pool.live == size);
}

void names_of_calls() {
  CHECK(copy_site_named("copy_in") == CopySite::copy_in);
  CHECK_THROWS(copy_site_named("launch"), std::invalid_argument);
}

}  // namespace

int main(int count, char** arguments) {
  names_of_calls();
  a_lost_device_is_left_alone();
  failures_at_random(count > 1 ? std::atoi(arguments[1]) : 1000);
  return 0;
}
