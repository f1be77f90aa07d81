#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "lowpeak/host/error.hpp"

namespace lowpeak::host {

/// @brief Anonymous private memory, aligned to a huge page; unmapped at the end of its life.
class Mapping {
 public:
  static constexpr std::size_t alignment = std::size_t{2} << 20;

  /// Maps `nbytes`, a multiple of the alignment; no page is touched.
  /// @throws HostMemoryError with the system's words.
  explicit Mapping(std::size_t nbytes) : size_(nbytes) {
    const std::size_t whole = rounded_up(nbytes + 1, alignment);
    void* start = mmap(nullptr, whole, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
      throw HostMemoryError("mmap of " + amount(nbytes) + " failed: " + std::strerror(errno));
    }
    auto* bytes = static_cast<std::byte*>(start);
    const std::size_t head =
        (alignment - reinterpret_cast<std::uintptr_t>(start) % alignment) % alignment;
    if (head > 0) munmap(bytes, head);
    if (whole - head - nbytes > 0) munmap(bytes + head + nbytes, whole - head - nbytes);
    data_ = bytes + head;
  }

  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  Mapping& operator=(Mapping&&) = delete;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data_ != nullptr) munmap(data_, size_);
  }

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

  /// Huge pages, where the system has them: fewer pages to fault in and to register.
  bool advise_huge_pages(bool wanted) const noexcept {
    return madvise(data_, size_, wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE) == 0;
  }

  /// Copy-on-write after a fork would move the parent's pages away from the device that writes
  /// them.
  bool keep_from_children() const noexcept { return madvise(data_, size_, MADV_DONTFORK) == 0; }

  /// Gives the memory up without unmapping it.
  std::byte* release() noexcept { return std::exchange(data_, nullptr); }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_;
};

}  // namespace lowpeak::host
