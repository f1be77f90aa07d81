#pragma once

#include <cstddef>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace lowpeak::host {

/// @brief Host memory that is not to be had; the text names the amounts.
class HostMemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// @brief A backend that this machine does not have.
class BackendError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An amount in the largest binary unit that leaves a digit before the point.
inline std::string amount(std::size_t bytes) {
  static constexpr const char* units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, units[unit]);
  return text;
}

/// The smallest multiple of `unit` that is not below `value`.
/// @throws HostMemoryError where it has no representation.
inline std::size_t rounded_up(std::size_t value, std::size_t unit) {
  if (value > static_cast<std::size_t>(-1) - (unit - 1)) {
    throw HostMemoryError("no machine has " + amount(value) + " of memory");
  }
  return (value + unit - 1) / unit * unit;
}

}  // namespace lowpeak::host
