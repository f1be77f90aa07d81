#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/error.hpp"
#include "lowpeak/host/fault_injector.hpp"
#include "lowpeak/host/mapping.hpp"
#include "lowpeak/host/numa.hpp"
#include "lowpeak/host/prefault.hpp"
#include "lowpeak/host/segment_resource.hpp"

namespace lowpeak::host {

/// @brief What pinning has cost, and what went wrong.
struct PinStatistics {
  double pin_seconds = 0;          ///< In all attempts, those that failed too.
  std::uint64_t driver_calls = 0;  ///< Register, unregister, allocate and free.
  std::uint64_t map_failures = 0;
  std::uint64_t thread_failures = 0;
  std::uint64_t register_failures = 0;
  std::uint64_t driver_allocation_failures = 0;
  std::uint64_t small_page_segments = 0;  ///< Segments without huge pages.
  std::uint64_t driver_segments = 0;      ///< Segments that the driver had to make.
  std::uint64_t unplaced_segments = 0;    ///< Segments for which the NUMA node was refused.
  std::uint64_t leaked_bytes = 0;         ///< What the driver did not take back.
};

/// @brief Segments that are mapped, placed, faulted in and registered, in this order.
///
/// Registering memory of one's own is 2 to 2.5 times faster than the driver's allocation, and the
/// memory is seen by cgroups (github.com/ikawrakow/ik_llama.cpp/pull/1988). Where it fails, it is
/// tried with small pages, and then the driver allocates.
class PinnedResource final : public SegmentResource {
 public:
  /// @param numa_node  Where the pages are to come from; -1: anywhere.
  /// @param threads  How many threads fault pages in.
  PinnedResource(std::shared_ptr<Driver> driver, int numa_node, std::size_t threads,
                 FaultInjector& faults)
      : driver_(std::move(driver)), numa_node_(numa_node), threads_(threads), faults_(faults) {}

  Segment allocate(std::size_t nbytes) override {
    const Stopwatch stopwatch(statistics_.pin_seconds);
    std::string reasons;
    for (const bool huge : {true, false}) {
      if (std::optional<Segment> segment = registered(nbytes, huge, reasons)) return *segment;
    }
    return of_driver(nbytes, reasons);
  }

  bool deallocate(const Segment& segment) noexcept override {
    ++statistics_.driver_calls;
    const Outcome outcome = given_back(segment);
    // What may still be registered must not be unmapped: the device would write to whatever the
    // system puts there next.
    if (!outcome.ok) statistics_.leaked_bytes += segment.nbytes;
    return outcome.ok;
  }

  const PinStatistics& statistics() const noexcept { return statistics_; }

 private:
  class Stopwatch {
   public:
    explicit Stopwatch(double& total) : total_(total) {}
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;
    ~Stopwatch() {
      total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

   private:
    double& total_;
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  };

  std::optional<Segment> registered(std::size_t nbytes, bool huge, std::string& reasons) {
    try {
      if (faults_.strikes(Site::map)) throw HostMemoryError("mmap failed: injected");
      Mapping mapping(nbytes);
      const bool has_huge_pages = mapping.advise_huge_pages(huge) && huge;
      if (numa_node_ >= 0 && !prefer_node(mapping.data(), nbytes, numa_node_)) {
        ++statistics_.unplaced_segments;
      }
      if (driver_->pins()) {
        // Plain memory may be read by children; and its pages come when they are needed.
        mapping.keep_from_children();
        statistics_.thread_failures += prefault(mapping.data(), nbytes, threads_, faults_);
      }
      ++statistics_.driver_calls;
      Outcome outcome = faults_.strikes(Site::register_host)
                            ? Outcome{false, "registration failed: injected"}
                            : driver_->register_host(mapping.data(), nbytes);
      if (outcome.ok) {
        if (!has_huge_pages) ++statistics_.small_page_segments;
        return Segment{mapping.release(), nbytes, false};
      }
      ++statistics_.register_failures;
      note(reasons, outcome.error);
    } catch (const HostMemoryError& error) {
      ++statistics_.map_failures;
      note(reasons, error.what());
    }
    return std::nullopt;
  }

  Segment of_driver(std::size_t nbytes, std::string& reasons) {
    void* data = nullptr;
    ++statistics_.driver_calls;
    const Outcome outcome = faults_.strikes(Site::allocate_host)
                                ? Outcome{false, "the driver's allocation failed: injected"}
                                : driver_->allocate_host(nbytes, &data);
    if (!outcome.ok) {
      ++statistics_.driver_allocation_failures;
      note(reasons, outcome.error);
      throw HostMemoryError(reasons);
    }
    ++statistics_.driver_segments;
    return Segment{static_cast<std::byte*>(data), nbytes, true};
  }

  Outcome given_back(const Segment& segment) {
    if (faults_.strikes(Site::unregister_host)) return {false, "injected"};
    if (segment.of_driver) return driver_->free_host(segment.data);
    Outcome outcome = driver_->unregister_host(segment.data);
    if (outcome.ok) munmap(segment.data, segment.nbytes);
    return outcome;
  }

  /// Appends a reason that is not there yet.
  static void note(std::string& reasons, const std::string& reason) {
    if (reasons.find(reason) != std::string::npos) return;
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }

  std::shared_ptr<Driver> driver_;
  int numa_node_;
  std::size_t threads_;
  FaultInjector& faults_;
  PinStatistics statistics_;
};

}  // namespace lowpeak::host
