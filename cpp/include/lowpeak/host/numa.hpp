#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <string>

#include "lowpeak/host/text_file.hpp"

namespace lowpeak::host {

/// @brief The NUMA node of a PCI device such as "0000:3B:00.0", -1 where the system does not say.
///
/// @param root  Put before "/sys"; for tests.
inline int node_of_pci_device(std::string bus_id, const std::string& root = "") {
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  // Drivers may write a domain of eight digits, sysfs writes four.
  const std::size_t colon = bus_id.find(':');
  if (colon != std::string::npos && colon > 4) bus_id.erase(0, colon - 4);
  const std::string text = text_of_file(root + "/sys/bus/pci/devices/" + bus_id + "/numa_node");
  return leading_number<int>(text).value_or(-1);
}

/// @brief Asks that the pages of a range, none of them touched yet, come from a node if they can.
///
/// Preferred, not bound: when the node is full, memory of another node is better than none.
/// By system call, so that no libnuma is needed. Whether the system agreed.
inline bool prefer_node(void* data, std::size_t nbytes, int node) noexcept {
  constexpr std::size_t bits = 8 * sizeof(unsigned long);
  constexpr int mpol_preferred = 1;
  std::array<unsigned long, 16> mask{};
  if (node < 0 || static_cast<std::size_t>(node) >= bits * mask.size()) return false;
  mask[static_cast<std::size_t>(node) / bits] = 1UL << (static_cast<std::size_t>(node) % bits);
  // The kernel reads one bit less than it is told.
  return syscall(SYS_mbind, data, nbytes, mpol_preferred, mask.data(), bits * mask.size() + 1,
                 0UL) == 0;
}

}  // namespace lowpeak::host
