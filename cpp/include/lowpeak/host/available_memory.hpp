#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "lowpeak/host/text_file.hpp"

namespace lowpeak::host {

/// @brief How much memory the process may still take, and which rule says so.
struct AvailableMemory {
  std::size_t nbytes = 0;
  std::string rule;  ///< "MemAvailable", "cgroup v2 memory.max" or "cgroup v1 memory.limit".
};

namespace detail {

/// The first number of a file; nothing where there is no file, or a word such as "max" in it.
inline std::optional<std::size_t> number_in(const std::string& path) {
  return leading_number<std::size_t>(text_of_file(path));
}

/// The number after `key` and a space in a file of "key number" lines.
inline std::optional<std::size_t> number_after(const std::string& path, const std::string& key) {
  const std::string text = text_of_file(path);
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view line = next_line(rest);
    if (line.rfind(key + " ", 0) == 0) return leading_number<std::size_t>(line.substr(key.size()));
  }
  return std::nullopt;
}

/// The process's path in the hierarchy of the memory controller: "0::/a/b" in version 2,
/// "4:memory:/a/b" in version 1.
inline std::string cgroup_path(const std::string& root, bool version_2) {
  const std::string text = text_of_file(root + "/proc/self/cgroup");
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string line(next_line(rest));
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool wanted =
        version_2 ? line.rfind("0::", 0) == 0 : controllers.find(",memory,") != std::string::npos;
    if (wanted) return line.substr(second + 1);
  }
  return "/";
}

/// Names of the files of a version of cgroups.
struct CgroupFiles {
  bool version_2;
  const char* mount;
  const char* limit;
  const char* usage;
  const char* reclaimable;
  const char* rule;
};

/// The least that any cgroup from the process's own up to the root of the mount has left. Page
/// cache that is not in use counts as free. In a container the path may be the host's and not exist
/// here; then the root of the mount is the container's own cgroup.
inline std::size_t left_in_cgroups(const std::string& root, const CgroupFiles& files) {
  constexpr std::size_t no_limit = std::numeric_limits<std::int64_t>::max() / 2;
  std::size_t least = std::numeric_limits<std::size_t>::max();
  std::string path = cgroup_path(root, files.version_2);
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    const std::string folder = root + files.mount + path + "/";
    const std::optional<std::size_t> limit = number_in(folder + files.limit);
    const std::optional<std::size_t> usage = number_in(folder + files.usage);
    if (limit && usage && *limit < no_limit) {
      const std::size_t cache = number_after(folder + "memory.stat", files.reclaimable).value_or(0);
      const std::size_t used = *usage - std::min(*usage, cache);
      least = std::min(least, *limit - std::min(*limit, used));
    }
    if (path.empty()) return least;
    path.erase(path.find_last_of('/'));
  }
}

}  // namespace detail

/// @brief The least of what the machine and the cgroups (version 1 and 2) of the process leave.
///
/// /proc/meminfo alone is the host's, also in a container whose limit is far lower.
/// @param root  Put before every path; for tests.
inline AvailableMemory available_memory(const std::string& root = "") {
  const std::size_t kib = detail::number_after(root + "/proc/meminfo", "MemAvailable:").value_or(0);
  AvailableMemory least{kib * 1024, "MemAvailable"};
  if (kib == 0) {
    least.nbytes = static_cast<std::size_t>(sysconf(_SC_AVPHYS_PAGES)) *
                   static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    least.rule = "free pages";
  }
  for (const detail::CgroupFiles& files : {
           detail::CgroupFiles{true, "/sys/fs/cgroup", "memory.max", "memory.current",
                               "inactive_file", "cgroup v2 memory.max"},
           detail::CgroupFiles{false, "/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                               "memory.usage_in_bytes", "total_inactive_file",
                               "cgroup v1 memory.limit"},
       }) {
    const std::size_t left = detail::left_in_cgroups(root, files);
    if (left < least.nbytes) least = {left, files.rule};
  }
  return least;
}

}  // namespace lowpeak::host
