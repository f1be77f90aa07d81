#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "lowpeak/host/available_memory.hpp"
#include "lowpeak/host/error.hpp"

namespace lowpeak::host {

/// @brief How much host memory may be taken.
struct BudgetOptions {
  std::optional<std::size_t> limit;  ///< The user's own cap, in bytes.
  std::size_t local_ranks = 1;       ///< Processes that share the machine's memory.
  std::function<AvailableMemory()> available = [] { return available_memory(); };
};

/// @brief What one pool, or several together, may reserve.
///
/// The system's own answer to too much memory is a SIGKILL without a word. The budget is the least
/// of the user's cap and 0.8 of what was available at the start, divided by the local ranks. What
/// is taken must also fit into 0.8 of what is available then: others may have taken memory since.
/// For any thread.
class Budget {
 public:
  /// Leaves a fifth for page cache, other processes and what this one allocates elsewhere.
  static constexpr double share = 0.8;

  explicit Budget(BudgetOptions options)
      : options_(std::move(options)), at_start_(options_.available()) {
    total_ = shared(at_start_.nbytes) / std::max<std::size_t>(1, options_.local_ranks);
    if (options_.limit) total_ = std::min(total_, *options_.limit);
  }

  /// @throws HostMemoryError with all amounts, before a page is touched
  void take(std::size_t nbytes) {
    const AvailableMemory now = options_.available();
    const std::lock_guard<std::mutex> lock(mutex_);
    if (nbytes > left()) {
      throw HostMemoryError("a segment of " + amount(nbytes) + " does not fit: " + told(now));
    }
    if (nbytes > shared(now.nbytes)) {
      throw HostMemoryError("a segment of " + amount(nbytes) + " does not fit: only 80 % of what " +
                            "is available may be taken; " + told(now));
    }
    reserved_ += nbytes;
  }

  void give(std::size_t nbytes) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    reserved_ -= nbytes;
  }

  /// The most bytes that take() would not refuse.
  std::size_t room() const {
    const std::size_t now = shared(options_.available().nbytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::min(left(), now);
  }

  std::size_t total() const noexcept { return total_; }

  std::size_t reserved() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reserved_;
  }

  /// The cap and what made it, what is reserved, what is available and by which rule.
  std::string description() const {
    const AvailableMemory now = options_.available();
    const std::lock_guard<std::mutex> lock(mutex_);
    return told(now);
  }

 private:
  static std::size_t shared(std::size_t nbytes) noexcept {
    return static_cast<std::size_t>(share * static_cast<double>(nbytes));
  }

  std::size_t left() const noexcept { return total_ - std::min(total_, reserved_); }

  std::string told(const AvailableMemory& now) const {
    return "the budget is " + amount(total_) + " (" + origin() + "), of which " +
           amount(reserved_) + " are reserved; " + amount(now.nbytes) + " are available (" +
           now.rule + ")";
  }

  /// Which rule made the budget what it is.
  std::string origin() const {
    if (options_.limit && total_ == *options_.limit) return "limit_bytes";
    std::string text = "80 % of the " + amount(at_start_.nbytes) + " that " + at_start_.rule +
                       " left when the pool was made";
    if (options_.local_ranks > 1) {
      text += ", for " + std::to_string(options_.local_ranks) + " local ranks";
    }
    return text;
  }

  BudgetOptions options_;
  AvailableMemory at_start_;
  std::size_t total_ = 0;
  mutable std::mutex mutex_;
  std::size_t reserved_ = 0;
};

}  // namespace lowpeak::host
