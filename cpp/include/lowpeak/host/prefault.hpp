#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

#include "lowpeak/host/fault_injector.hpp"

namespace lowpeak::host {

namespace detail {

/// Writes to each page of a range, which makes the system provide it.
inline void touch(std::byte* data, std::size_t nbytes) noexcept {
  constexpr std::size_t page = 4096;
  for (std::size_t i = 0; i < nbytes; i += page) {
    static_cast<volatile std::byte*>(data)[i] = std::byte{0};
  }
}

}  // namespace detail

/// @brief Faults in a fresh range by `threads` threads, the caller's among them.
///
/// A driver that registers untouched memory faults it in on one thread, under its own lock.
/// Threads that could not be created are counted, and the caller does their part.
/// @return how many threads could not be created.
inline std::size_t prefault(std::byte* data, std::size_t nbytes, std::size_t threads,
                            FaultInjector& faults) {
  constexpr std::size_t unit = std::size_t{2} << 20;  // a huge page is faulted in by one thread
  const std::size_t pieces = std::max<std::size_t>(1, std::min(threads, nbytes / unit));
  const std::size_t piece = (nbytes / pieces + unit - 1) / unit * unit;
  std::size_t failures = 0;
  std::vector<std::thread> workers;
  workers.reserve(pieces);
  for (std::size_t begin = piece; begin < nbytes; begin += piece) {
    const std::size_t size = std::min(piece, nbytes - begin);
    try {
      if (faults.strikes(Site::thread)) {
        throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
      }
      workers.emplace_back(detail::touch, data + begin, size);
    } catch (const std::system_error&) {
      ++failures;
      detail::touch(data + begin, size);
    }
  }
  detail::touch(data, std::min(piece, nbytes));
  for (std::thread& worker : workers) worker.join();
  return failures;
}

}  // namespace lowpeak::host
