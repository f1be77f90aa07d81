#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

namespace lowpeak::host {

/// @brief What a pool's entries throw in a process that was forked from the pool's own.
class ForkedError : public std::runtime_error {
 public:
  ForkedError()
      : std::runtime_error(
            "this pool of host memory belongs to the parent process, whose memory a forked child "
            "cannot use; start the child by spawn, or make a pool of its own there") {}
};

namespace detail {
inline std::atomic<std::uint64_t> forks{0};
inline std::atomic<bool> exiting{false};
}  // namespace detail

/// @brief Remembers the process it was made in; its answer differs in a forked child and at exit.
///
/// In a child the memory is not mapped (MADV_DONTFORK) and a lock may be held by a thread that is
/// not there, so nothing may be touched. At exit the driver may be gone already, so what is still
/// held is left to the operating system.
class ProcessGuard {
 public:
  ProcessGuard() noexcept : born_(generation()) {}

  /// @throws ForkedError in a forked child.
  void check() const {
    if (forked()) throw ForkedError();
  }

  bool forked() const noexcept { return detail::forks.load() != born_; }

  /// Whether memory may still be given back to the driver and the system.
  bool may_release() const noexcept { return !forked() && !detail::exiting.load(); }

  /// Called when the process begins to end, by Python or by exit().
  static void begin_exit() noexcept { detail::exiting.store(true); }

 private:
  static std::uint64_t generation() noexcept {
    [[maybe_unused]] static const bool watching = [] {
      pthread_atfork(nullptr, nullptr, [] { detail::forks.fetch_add(1); });
      return std::atexit(&ProcessGuard::begin_exit) == 0;
    }();
    return detail::forks.load();
  }

  std::uint64_t born_;
};

}  // namespace lowpeak::host
