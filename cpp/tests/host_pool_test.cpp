// The whole stack: threads, forks, the end of the process, injected failures.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "lowpeak/host/backends.hpp"
#include "lowpeak/host/block.hpp"
#include "lowpeak/host/sim_driver.hpp"

using namespace lowpeak::host;

namespace {

constexpr std::size_t KiB = std::size_t{1} << 10;
constexpr std::size_t MiB = std::size_t{1} << 20;

HostPoolOptions small_pool() {
  HostPoolOptions options;
  options.pool = {8 * MiB, 2 * MiB, 0};
  options.budget.limit = 64 * MiB;
  options.threads = 2;
  return options;
}

std::shared_ptr<HostPool> make_pool(const std::shared_ptr<Driver>& driver) {
  return std::make_shared<HostPool>(driver, small_pool());
}

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

void backends_by_name() {
  std::string why;
  CHECK(!make_driver("null", 0, &why)->pins());
  CHECK(make_driver("sim", 0, &why)->pins());
  CHECK_THROWS(make_driver("metal", 0, &why), std::invalid_argument);
}

void memory_given_back_is_poisoned() {
  const auto pool = make_pool(std::make_shared<SimDriver>());
  const Block witness(pool, 10);
  std::byte* data = nullptr;
  {
    const Block block(pool, 100);
    data = block.data();
    std::memset(data, 1, 100);
  }
  CHECK(data[0] == std::byte{0xCB} && data[99] == std::byte{0xCB});
}

void a_closed_pool_ends_with_its_last_block() {
  const auto driver = std::make_shared<SimDriver>();
  auto pool = make_pool(driver);
  {
    const Block block(pool, 100);
    auto early = std::make_unique<Block>(pool, 8 * MiB);
    CHECK(driver->held() == 16 * MiB);
    pool->close();
    CHECK(driver->held() == 16 * MiB);
    early.reset();
    CHECK(driver->held() == 8 * MiB);
    CHECK_THROWS(pool->allocate_block(1), std::runtime_error);
    pool.reset();
    CHECK(driver->held() == 8 * MiB);
    block.data()[0] = std::byte{1};
  }
  CHECK(driver->held() == 0);
}

void a_pool_gives_back_what_nobody_released() {
  const auto driver = std::make_shared<SimDriver>();
  make_pool(driver)->allocate_record(20 * MiB);
  CHECK(driver->held() == 0);
}

/// Threads that allocate, write, compare and release, while one trims and reads statistics.
void threads() {
  const auto driver = std::make_shared<SimDriver>();
  {
    const auto pool = make_pool(driver);
    std::vector<std::thread> workers;
    for (unsigned char owner = 1; owner <= 4; ++owner) {
      workers.emplace_back([&pool, owner] {
        for (int round = 0; round < 20; ++round) {
          try {
            const Block block(pool, (round % 7 + 1) * 50 * KiB);
            const auto record = pool->allocate_record((round % 3 + 1) * MiB);
            const std::vector<Run> runs = pool->runs(record);
            std::memset(block.data(), owner, block.nbytes());
            for (const Run& run : runs) std::memset(run.data, owner, run.nbytes);
            CHECK(block.data()[block.nbytes() - 1] == std::byte{owner});
            for (const Run& run : runs) CHECK(run.data[run.nbytes - 1] == std::byte{owner});
            pool->release(record);
          } catch (const HostMemoryError&) {
          }
        }
      });
    }
    for (int round = 0; round < 50; ++round) {
      pool->trim(8 * MiB);
      const HostPoolStatistics statistics = pool->statistics();
      CHECK(statistics.pool.used <= statistics.pool.reserved);
      CHECK(statistics.pool.reserved <= statistics.budget);
    }
    for (std::thread& worker : workers) worker.join();
    CHECK(pool->statistics().pool.live == 0);
  }
  CHECK(driver->held() == 0);
}

/// The simulated driver without the cost of faulting pages in.
class Unfaulted final : public Driver {
 public:
  const char* name() const noexcept override { return "unfaulted"; }
  bool pins() const noexcept override { return false; }
  Outcome register_host(void* data, std::size_t nbytes) override {
    return sim_.register_host(data, nbytes);
  }
  Outcome unregister_host(void* data) override { return sim_.unregister_host(data); }
  Outcome allocate_host(std::size_t nbytes, void** data) override {
    return sim_.allocate_host(nbytes, data);
  }
  Outcome free_host(void* data) override { return sim_.free_host(data); }
  std::size_t held() const { return sim_.held(); }

 private:
  SimDriver sim_;
};

/// 2,000 plans of failures: each ends in memory or in an error, and the pool stays whole.
void failures_at_random() {
  const auto driver = std::make_shared<Unfaulted>();
  {
    const auto pool = make_pool(driver);
    std::uint64_t state = 1;
    std::size_t refused = 0;
    for (int round = 0; round < 2000; ++round) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      const auto site = static_cast<Site>((state >> 33) % 4);
      // Two or three in a row take the ways out in their order; four leave none.
      pool->fail(site, (state >> 40) % 2, 1 + (state >> 43) % 4);
      if (round % 4 == 0) pool->fail(Site::allocate_host, 0, 1);
      try {
        const Block block(pool, 1 + (state >> 35) % (20 * MiB));
        block.data()[block.nbytes() - 1] = std::byte{1};
      } catch (const HostMemoryError&) {
        ++refused;
      }
      CHECK(pool->statistics().pool.live == 0);
      pool->trim(0);
      CHECK(driver->held() == 0);
    }
    for (const Site site : {Site::map, Site::thread, Site::register_host, Site::allocate_host}) {
      pool->fail(site, 0, 0);
    }
    CHECK(refused > 20 && refused < 1500);
    CHECK(pool->statistics().pool.refusals == refused);
    const Block block(pool, 60 * MiB);
    CHECK(block.nbytes() == 60 * MiB);
  }
  CHECK(driver->held() == 0);
}

void a_child_may_not_use_its_parents_pool() {
  const auto driver = std::make_shared<SimDriver>();
  auto pool = make_pool(driver);
  auto block = std::make_unique<Block>(pool, 100);
  std::byte* const data = block->data();
  unsigned char page = 0;
  CHECK(mincore(data, 4096, &page) == 0);
  const int status = in_child([&] {
    CHECK(mincore(data, 4096, &page) == -1 && errno == ENOMEM);  // not mapped here
    CHECK_THROWS(pool->allocate_block(1), ForkedError);
    CHECK_THROWS(pool->trim({}), ForkedError);
    CHECK_THROWS(pool->statistics(), ForkedError);
    CHECK_THROWS(pool->close(), ForkedError);
    CHECK_THROWS(block->data(), ForkedError);
    // The destructors do nothing: the memory is not mapped here.
    block.reset();
    pool.reset();
    CHECK(driver->held() == 8 * MiB);
    const auto own = make_pool(std::make_shared<SimDriver>());
    const Block fresh(own, 100);
    fresh.data()[99] = std::byte{1};
  });
  CHECK(status == 0);
  block->data()[0] = std::byte{1};
  CHECK(pool->statistics().pool.live == 100);
}

/// A driver that ends the process when it is asked for anything at the end.
class Departed final : public Driver {
 public:
  const char* name() const noexcept override { return "departed"; }
  bool pins() const noexcept override { return true; }
  Outcome register_host(void*, std::size_t) override { return {}; }
  Outcome unregister_host(void*) override { return call(); }
  Outcome allocate_host(std::size_t, void**) override { return call(); }
  Outcome free_host(void*) override { return call(); }

 private:
  static Outcome call() { _exit(2); }
};

/// Destroyed by exit(), when the driver may be gone.
std::shared_ptr<HostPool> until_the_end;

void the_end_of_the_process_calls_no_driver() {
  const int at_exit = in_child([] {
    until_the_end = make_pool(std::make_shared<Departed>());
    until_the_end->allocate_block(100);
    std::exit(0);
  });
  CHECK(at_exit == 0);
  const int when_python_ends = in_child([] {
    auto block = std::make_unique<Block>(make_pool(std::make_shared<Departed>()), 100);
    ProcessGuard::begin_exit();
    block.reset();
  });
  CHECK(when_python_ends == 0);
}

}  // namespace

int main() {
  backends_by_name();
  memory_given_back_is_poisoned();
  a_closed_pool_ends_with_its_last_block();
  a_pool_gives_back_what_nobody_released();
  a_child_may_not_use_its_parents_pool();
  the_end_of_the_process_calls_no_driver();
  failures_at_random();
  threads();
  return 0;
}
