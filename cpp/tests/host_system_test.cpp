// What host memory asks of the system: mappings, page faults, nodes, and how much memory is left.

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.hpp"
#include "lowpeak/host/available_memory.hpp"
#include "lowpeak/host/mapping.hpp"
#include "lowpeak/host/numa.hpp"
#include "lowpeak/host/prefault.hpp"

using namespace lowpeak::host;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;
namespace fs = std::filesystem;

/// A folder that stands for "/", deleted at the end.
struct Root {
  Root() {
    std::string pattern = (fs::temp_directory_path() / "lowpeak-root-XXXXXX").string();
    CHECK(mkdtemp(pattern.data()) != nullptr);
    path = pattern;
  }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;
  ~Root() { fs::remove_all(path); }

  void write(const std::string& name, const std::string& text) const {
    const fs::path file = path + name;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }

  std::string path;
};

void amounts() {
  CHECK(amount(0) == "0 bytes");
  CHECK(amount(1023) == "1023 bytes");
  CHECK(amount(1536) == "1.50 KiB");
  CHECK(amount(std::size_t{5} << 40) == "5.00 TiB");
  CHECK(rounded_up(1, 8) == 8);
  CHECK(rounded_up(16, 8) == 16);
  CHECK_THROWS(rounded_up(SIZE_MAX, 8), HostMemoryError);
}

void mappings_are_aligned() {
  for (const std::size_t size : {2 * MiB, 6 * MiB}) {
    Mapping mapping(size);
    CHECK(reinterpret_cast<std::uintptr_t>(mapping.data()) % (2 * MiB) == 0);
    CHECK(mapping.size() == size);
    mapping.data()[0] = mapping.data()[size - 1] = std::byte{1};
    Mapping moved(std::move(mapping));
    CHECK(moved.data()[size - 1] == std::byte{1});
  }
  CHECK_THROWS(Mapping(std::size_t{1} << 60), HostMemoryError);
}

void a_released_mapping_stays() {
  std::byte* data = nullptr;
  {
    Mapping mapping(2 * MiB);
    data = mapping.release();
  }
  data[5] = std::byte{1};
  CHECK(munmap(data, 2 * MiB) == 0);
}

/// How many pages of the range are there, by the system's own account.
std::size_t resident(std::byte* data, std::size_t nbytes) {
  std::string pages(nbytes / 4096, '\0');
  CHECK(mincore(data, nbytes, reinterpret_cast<unsigned char*>(pages.data())) == 0);
  std::size_t count = 0;
  for (const char page : pages) count += static_cast<std::size_t>(page & 1);
  return count;
}

void every_page_is_faulted_in() {
  for (const std::size_t threads : {1, 2, 3, 8}) {
    for (const std::size_t failing : {0, 1, 100}) {
      Mapping mapping(6 * MiB);
      mapping.advise_huge_pages(false);
      CHECK(resident(mapping.data(), 6 * MiB) == 0);
      FaultInjector faults;
      faults.fail(Site::thread, 0, failing);
      const std::size_t workers = std::min<std::size_t>(threads, 3) - 1;
      CHECK(prefault(mapping.data(), 6 * MiB, threads, faults) == std::min(failing, workers));
      CHECK(resident(mapping.data(), 6 * MiB) == 6 * MiB / 4096);
    }
  }
}

void nodes() {
  const Root root;
  root.write("/sys/bus/pci/devices/0000:3b:00.0/numa_node", "1\n");
  CHECK(node_of_pci_device("0000:3B:00.0", root.path) == 1);
  CHECK(node_of_pci_device("00000000:3B:00.0", root.path) == 1);
  CHECK(node_of_pci_device("0000:3C:00.0", root.path) == -1);
  Mapping mapping(2 * MiB);
  CHECK(!prefer_node(mapping.data(), 2 * MiB, -1));
  CHECK(!prefer_node(mapping.data(), 2 * MiB, 1 << 20));
  if (fs::exists("/sys/devices/system/node/node0")) {
    // A kernel or a sandbox without NUMA says no; both answers leave usable memory.
    prefer_node(mapping.data(), 2 * MiB, 0);
    mapping.data()[0] = std::byte{1};
  }
}

void memory_of_the_machine() {
  const Root root;
  root.write("/proc/meminfo", "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    2000 kB\n");
  CHECK(available_memory(root.path).nbytes == 2000 * 1024);
  CHECK(available_memory(root.path).rule == "MemAvailable");
  CHECK(available_memory().nbytes > 0);
}

void memory_of_a_version_2_cgroup() {
  const Root root;
  root.write("/proc/meminfo", "MemAvailable: 2000 kB\n");
  root.write("/proc/self/cgroup", "1:name=systemd:/other\n0::/job/step\n");
  // The step has no limit of its own; its parent has one.
  root.write("/sys/fs/cgroup/job/step/memory.max", "max\n");
  root.write("/sys/fs/cgroup/job/step/memory.current", "1000\n");
  root.write("/sys/fs/cgroup/job/memory.max", "500000\n");
  root.write("/sys/fs/cgroup/job/memory.current", "400000\n");
  CHECK(available_memory(root.path).nbytes == 100000);
  root.write("/sys/fs/cgroup/job/memory.stat", "anon 5\ninactive_file 30000\nfile 9\n");
  CHECK(available_memory(root.path).nbytes == 130000);
  CHECK(available_memory(root.path).rule == "cgroup v2 memory.max");
  // The tightest of all counts, wherever it is.
  root.write("/sys/fs/cgroup/memory.max", "900000\n");
  root.write("/sys/fs/cgroup/memory.current", "0\n");
  CHECK(available_memory(root.path).nbytes == 130000);
  root.write("/sys/fs/cgroup/job/memory.current", "600000\n");
  CHECK(available_memory(root.path).nbytes == 0);
}

void memory_of_a_version_1_cgroup() {
  const Root root;
  const std::string mount = "/sys/fs/cgroup/memory";
  root.write("/proc/meminfo", "MemAvailable: 2000 kB\n");
  // A container: the path is the host's, the mount is the container's own.
  root.write("/proc/self/cgroup", "5:cpu,cpuacct:/docker/1\n4:hugetlb,memory:/docker/1\n");
  root.write(mount + "/memory.limit_in_bytes", "9223372036854771712\n");
  root.write(mount + "/memory.usage_in_bytes", "400000\n");
  CHECK(available_memory(root.path).rule == "MemAvailable");
  root.write(mount + "/memory.limit_in_bytes", "450000\n");
  root.write(mount + "/memory.stat", "inactive_file 1\ntotal_inactive_file 7\n");
  CHECK(available_memory(root.path).nbytes == 50007);
  CHECK(available_memory(root.path).rule == "cgroup v1 memory.limit");
}

}  // namespace

int main() {
  amounts();
  mappings_are_aligned();
  a_released_mapping_stays();
  every_page_is_faulted_in();
  nodes();
  memory_of_the_machine();
  memory_of_a_version_2_cgroup();
  memory_of_a_version_1_cgroup();
  return 0;
}
