#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lowpeak/host/budget_resource.hpp"
#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/extent_pool.hpp"
#include "lowpeak/host/fault_injector.hpp"
#include "lowpeak/host/null_driver.hpp"
#include "lowpeak/host/pinned_resource.hpp"
#include "lowpeak/host/process_guard.hpp"

namespace lowpeak::host {

/// @brief All that a pool of host memory can be told.
struct HostPoolOptions {
  PoolOptions pool;
  BudgetOptions budget;
  std::optional<int> numa_node;  ///< -1: anywhere; not given: the node of the driver's device.
  std::size_t threads = 1;       ///< Threads that fault pages in.
};

/// @brief What a pool tells of itself.
struct HostPoolStatistics {
  PoolStatistics pool;
  PinStatistics pin;
  std::size_t budget = 0;  ///< Bytes.
  int numa_node = -1;
};

/// @brief The whole stack, for any thread: extents over a budget over pinned segments over a
/// driver.
///
/// Every entry throws ForkedError in a forked child, except release() and the destructor, which do
/// nothing there. One mutex guards all of it; a thread that needs it must not hold Python's lock.
class HostPool {
 public:
  using Id = ExtentPool::Id;

  HostPool(std::shared_ptr<Driver> driver, const HostPoolOptions& options)
      : HostPool(std::move(driver), options, std::make_shared<Budget>(options.budget)) {}

  /// @param budget  What this pool and others reserve together.
  HostPool(std::shared_ptr<Driver> driver, const HostPoolOptions& options,
           std::shared_ptr<Budget> budget)
      : driver_(std::move(driver)),
        sizes_(options.pool),
        numa_node_(options.numa_node ? *options.numa_node : driver_->numa_node()),
        budget_(std::move(budget)),
        pinned_(driver_, numa_node_, options.threads, faults_),
        within_budget_(pinned_, budget_),
        pool_(within_budget_, options.pool) {}

  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  ~HostPool() {
    if (!guard_.may_release()) pool_.abandon();
  }

  /// @throws HostMemoryError, std::invalid_argument, std::runtime_error once it is closed
  Id allocate_block(std::size_t nbytes, bool may_grow = true) {
    const std::lock_guard<std::mutex> lock(open());
    return pool_.allocate_block(nbytes, may_grow);
  }

  /// @throws HostMemoryError, std::invalid_argument, std::runtime_error once it is closed
  Id allocate_record(std::size_t nbytes, bool may_grow = true) {
    const std::lock_guard<std::mutex> lock(open());
    return pool_.allocate_record(nbytes, may_grow);
  }

  std::vector<Run> runs(Id id) const {
    const std::lock_guard<std::mutex> lock(entered());
    return pool_.runs(id);
  }

  /// @throws std::invalid_argument for what is not live
  void release(Id id) {
    if (!guard_.may_release()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (driver_->poisons()) {
      for (const Run& run : pool_.runs(id)) std::memset(run.data, poison, run.nbytes);
    }
    pool_.release(id);
    if (closed_) pool_.trim(0);
  }

  /// Gives free segments back, down to `keep` bytes or the low-water mark. How many bytes went.
  std::size_t trim(std::optional<std::size_t> keep) {
    const std::lock_guard<std::mutex> lock(entered());
    return keep ? pool_.trim(*keep) : pool_.trim();
  }

  /// A step begins: free segments that none of the last `idle_steps` used go back. How many bytes.
  std::size_t begin_step(std::uint64_t idle_steps) {
    const std::lock_guard<std::mutex> lock(entered());
    return pool_.begin_step(idle_steps);
  }

  /// A pool of plain memory, by whose side this one reserves what is left of the one budget.
  std::shared_ptr<HostPool> plain_pool() const {
    guard_.check();
    HostPoolOptions options;
    options.pool = {sizes_.segment_bytes, sizes_.extent_bytes, 0};
    options.numa_node = numa_node_;
    return std::make_shared<HostPool>(std::make_shared<NullDriver>(driver_->poisons()), options,
                                      budget_);
  }

  /// Allocates nothing any more, and gives each segment back as soon as it is free.
  void close() {
    const std::lock_guard<std::mutex> lock(entered());
    closed_ = true;
    pool_.trim(0);
  }

  HostPoolStatistics statistics() const {
    const std::lock_guard<std::mutex> lock(entered());
    return {pool_.statistics(), pinned_.statistics(), budget_->total(), numa_node_};
  }

  /// Bytes that can be had without a further segment, wherever they lie.
  std::size_t free_bytes() const {
    const std::lock_guard<std::mutex> lock(entered());
    return pool_.statistics().reserved - pool_.statistics().used;
  }

  /// The next `skip` calls of a site succeed, `times` calls after them fail.
  void fail(Site site, std::uint64_t skip, std::uint64_t times) {
    const std::lock_guard<std::mutex> lock(entered());
    faults_.fail(site, skip, times);
  }

  /// @throws ForkedError in a forked child.
  void check_process() const { guard_.check(); }

  const Driver& driver() const noexcept { return *driver_; }

 private:
  static constexpr int poison = 0xCB;

  std::mutex& entered() const {
    guard_.check();
    return mutex_;
  }

  std::mutex& open() const {
    guard_.check();
    if (closed_) throw std::runtime_error("the pool is closed: it allocates nothing any more");
    return mutex_;
  }

  mutable std::mutex mutex_;
  std::atomic<bool> closed_{false};
  ProcessGuard guard_;
  FaultInjector faults_;
  std::shared_ptr<Driver> driver_;
  PoolOptions sizes_;
  int numa_node_;
  std::shared_ptr<Budget> budget_;
  PinnedResource pinned_;
  BudgetResource within_budget_;
  ExtentPool pool_;
};

}  // namespace lowpeak::host
