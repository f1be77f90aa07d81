#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "lowpeak/host/available_memory.hpp"
#include "lowpeak/host/error.hpp"
#include "lowpeak/host/segment_resource.hpp"

namespace lowpeak::host {

/// @brief How much host memory may be taken.
struct BudgetOptions {
  std::optional<std::size_t> limit;  ///< The user's own cap, in bytes.
  std::size_t local_ranks = 1;       ///< Processes that share the machine's memory.
  std::function<AvailableMemory()> available = [] { return available_memory(); };
};

/// @brief Refuses what would go over a budget, before a page is touched.
///
/// The system's own answer to too much memory is a SIGKILL without a word. The budget is the least
/// of the user's cap and 0.8 of what was available at the start, divided by the local ranks. Each
/// segment must also fit into 0.8 of what is available when it is asked for: others may have taken
/// memory since.
class BudgetResource final : public SegmentResource {
 public:
  /// Leaves a fifth for page cache, other processes and what this one allocates elsewhere.
  static constexpr double share = 0.8;

  BudgetResource(SegmentResource& upstream, BudgetOptions options)
      : upstream_(upstream), options_(std::move(options)), at_start_(options_.available()) {
    budget_ = shared(at_start_.nbytes) / std::max<std::size_t>(1, options_.local_ranks);
    if (options_.limit) budget_ = std::min(budget_, *options_.limit);
  }

  Segment allocate(std::size_t nbytes) override {
    const AvailableMemory now = options_.available();
    if (nbytes > budget_ - std::min(budget_, reserved_)) {
      throw HostMemoryError("a segment of " + amount(nbytes) + " does not fit: the budget is " +
                            amount(budget_) + " (" + origin() + "), of which " + amount(reserved_) +
                            " are reserved");
    }
    if (nbytes > shared(now.nbytes)) {
      throw HostMemoryError("a segment of " + amount(nbytes) + " does not fit: only " +
                            amount(now.nbytes) + " are available (" + now.rule +
                            "), of which 80 % may be taken; " + amount(reserved_) +
                            " of a budget of " + amount(budget_) + " are reserved");
    }
    Segment segment = upstream_.allocate(nbytes);
    reserved_ += segment.nbytes;
    return segment;
  }

  bool deallocate(const Segment& segment) noexcept override {
    // A segment that the driver did not take back is still there, and counts.
    if (!upstream_.deallocate(segment)) return false;
    reserved_ -= segment.nbytes;
    return true;
  }

  std::size_t room() override {
    return std::min({budget_ - std::min(budget_, reserved_), shared(options_.available().nbytes),
                     upstream_.room()});
  }

  std::size_t budget() const noexcept { return budget_; }
  std::size_t reserved() const noexcept { return reserved_; }

 private:
  static std::size_t shared(std::size_t nbytes) noexcept {
    return static_cast<std::size_t>(share * static_cast<double>(nbytes));
  }

  /// Which rule made the budget what it is.
  std::string origin() const {
    if (options_.limit && budget_ == *options_.limit) return "limit_bytes";
    std::string text = "80 % of the " + amount(at_start_.nbytes) + " that " + at_start_.rule +
                       " left when the pool was made";
    if (options_.local_ranks > 1) {
      text += ", for " + std::to_string(options_.local_ranks) + " local ranks";
    }
    return text;
  }

  SegmentResource& upstream_;
  BudgetOptions options_;
  AvailableMemory at_start_;
  std::size_t budget_ = 0;
  std::size_t reserved_ = 0;
};

}  // namespace lowpeak::host
