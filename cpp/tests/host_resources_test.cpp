// Pinned segments and their budget, over the simulated driver.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "lowpeak/host/budget_resource.hpp"
#include "lowpeak/host/null_driver.hpp"
#include "lowpeak/host/pinned_resource.hpp"
#include "lowpeak/host/sim_driver.hpp"

using namespace lowpeak::host;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const HostMemoryError& error) {
    return error.what();
  }
  CHECK(!"it was not refused");
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void the_simulated_driver_checks_its_callers() {
  SimDriver driver;
  std::vector<std::byte> memory(400);
  std::byte* data = memory.data();
  CHECK(driver.register_host(data + 100, 100).ok);
  CHECK(!driver.register_host(data + 100, 100).ok);
  CHECK(!driver.register_host(data, 101).ok);
  CHECK(!driver.register_host(data + 199, 10).ok);
  CHECK(driver.register_host(data, 100).ok);
  CHECK(driver.register_host(data + 200, 100).ok);
  CHECK(driver.held() == 300);
  CHECK(!driver.unregister_host(data + 1).ok);
  for (const std::size_t begin : {0, 100, 200}) CHECK(driver.unregister_host(data + begin).ok);
  CHECK(!driver.unregister_host(data).ok);
  CHECK(!driver.free_host(data).ok);
  void* allocated = nullptr;
  CHECK(driver.allocate_host(4 * MiB, &allocated).ok);
  CHECK(driver.held() == 4 * MiB);
  CHECK(driver.free_host(allocated).ok);
  CHECK(driver.held() == 0);
}

void plain_memory_comes_when_it_is_touched() {
  FaultInjector faults;
  PinnedResource resource(std::make_shared<NullDriver>(), -1, 2, faults);
  const Segment segment = resource.allocate(4 * MiB);
  std::vector<unsigned char> pages(4 * MiB / 4096);
  CHECK(mincore(segment.data, segment.nbytes, pages.data()) == 0);
  for (const unsigned char page : pages) CHECK((page & 1) == 0);
  CHECK(resource.deallocate(segment));
}

/// Each failure makes the next way the one that is taken.
void fallbacks_in_their_order() {
  for (const std::uint64_t failing : {0, 1, 2}) {
    for (const Site site : {Site::map, Site::register_host}) {
      auto driver = std::make_shared<SimDriver>();
      FaultInjector faults;
      faults.fail(site, 0, failing);
      PinnedResource resource(driver, -1, 2, faults);
      const Segment segment = resource.allocate(4 * MiB);
      CHECK(segment.of_driver == (failing == 2));
      segment.data[0] = segment.data[4 * MiB - 1] = std::byte{1};
      CHECK(driver->held() == 4 * MiB);
      const PinStatistics& statistics = resource.statistics();
      CHECK((site == Site::map ? statistics.map_failures : statistics.register_failures) ==
            failing);
      CHECK(statistics.driver_segments == (failing == 2 ? 1U : 0U));
      if (failing == 1) CHECK(statistics.small_page_segments == 1);
      CHECK(statistics.pin_seconds > 0);
      CHECK(resource.deallocate(segment));
      CHECK(driver->held() == 0);
      CHECK(statistics.leaked_bytes == 0);
    }
  }
}

void when_nothing_works_all_reasons_are_told() {
  auto driver = std::make_shared<SimDriver>();
  FaultInjector faults;
  faults.fail(Site::map, 0, 1);
  faults.fail(Site::register_host, 0, 1);
  faults.fail(Site::allocate_host, 0, 1);
  PinnedResource resource(driver, -1, 1, faults);
  const std::string text = refusal([&] { resource.allocate(4 * MiB); });
  CHECK(has(text, "mmap failed: injected; registration failed: injected; the driver's"));
  CHECK(driver->held() == 0);
  CHECK(resource.statistics().driver_allocation_failures == 1);
  CHECK(resource.deallocate(resource.allocate(4 * MiB)));
}

void what_the_driver_keeps_is_not_unmapped() {
  auto driver = std::make_shared<SimDriver>();
  FaultInjector faults;
  faults.fail(Site::unregister_host, 0, 1);
  PinnedResource resource(driver, -1, 1, faults);
  const Segment segment = resource.allocate(4 * MiB);
  CHECK(!resource.deallocate(segment));
  CHECK(resource.statistics().leaked_bytes == 4 * MiB);
  segment.data[0] = std::byte{1};
  CHECK(driver->unregister_host(segment.data).ok);
  CHECK(!resource.deallocate(segment));  // refused by the driver itself
  segment.data[0] = std::byte{2};
  CHECK(resource.statistics().leaked_bytes == 8 * MiB);
  CHECK(munmap(segment.data, segment.nbytes) == 0);
}

/// Hands out addresses without memory behind them.
class Addresses final : public SegmentResource {
 public:
  Segment allocate(std::size_t nbytes) override {
    if (refuse) throw HostMemoryError("refused");
    return {nullptr, nbytes, false};
  }
  bool deallocate(const Segment&) noexcept override { return give_back; }
  bool give_back = true;
  bool refuse = false;
};

void budgets() {
  Addresses upstream;
  AvailableMemory available{1000 * MiB, "a rule"};
  BudgetOptions options;
  options.available = [&] { return available; };
  CHECK(Budget(options).total() == 800 * MiB);
  options.local_ranks = 4;
  Budget of_ranks(options);
  CHECK(of_ranks.total() == 200 * MiB);
  CHECK(has(refusal([&] { of_ranks.take(201 * MiB); }),
            "a segment of 201.00 MiB does not fit: the budget is 200.00 MiB (80 % of the 1000.00 "
            "MiB that a rule left when the pool was "
            "made, for 4 local ranks), of which 0 bytes are reserved; 1000.00 MiB are available (a "
            "rule)"));
  options.limit = 100 * MiB;
  const auto budget = std::make_shared<Budget>(options);
  BudgetResource capped(upstream, budget);
  CHECK(capped.room() == 100 * MiB);
  const Segment segment = capped.allocate(60 * MiB);
  CHECK(capped.room() == 40 * MiB);
  CHECK(has(refusal([&] { capped.allocate(50 * MiB); }),
            "a segment of 50.00 MiB does not fit: the budget is 100.00 MiB (limit_bytes), of which "
            "60.00 MiB are reserved"));
  // Others have taken memory since: 10 MiB of the budget would bring the OOM killer.
  available.nbytes = 10 * MiB;
  CHECK(capped.room() == 8 * MiB);
  CHECK(has(refusal([&] { capped.allocate(10 * MiB); }),
            "a segment of 10.00 MiB does not fit: only 80 % of what is available may be taken; "
            "the budget is 100.00 MiB (limit_bytes), of which 60.00 MiB are reserved; 10.00 MiB "
            "are available (a rule)"));
  available.nbytes = 1000 * MiB;
  upstream.refuse = true;
  CHECK(has(refusal([&] { capped.allocate(20 * MiB); }),
            "refused; the budget is 100.00 MiB (limit_bytes), of which 60.00 MiB are reserved"));
  upstream.refuse = false;
  // Another resource reserves what this one leaves.
  BudgetResource other(upstream, budget);
  const Segment rest = other.allocate(40 * MiB);
  CHECK(capped.room() == 0);
  CHECK(other.deallocate(rest));
  CHECK(capped.room() == 40 * MiB);
  upstream.give_back = false;
  CHECK(!capped.deallocate(segment));
  CHECK(budget->reserved() == 60 * MiB);
  upstream.give_back = true;
  CHECK(capped.deallocate(segment));
  CHECK(budget->reserved() == 0);
}

}  // namespace

int main() {
  the_simulated_driver_checks_its_callers();
  plain_memory_comes_when_it_is_touched();
  fallbacks_in_their_order();
  when_nothing_works_all_reasons_are_told();
  what_the_driver_keeps_is_not_unmapped();
  budgets();
  return 0;
}
