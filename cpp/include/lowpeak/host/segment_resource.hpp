#pragma once

#include <cstddef>
#include <limits>

namespace lowpeak::host {

/// @brief A piece of host memory that devices can copy from and to.
struct Segment {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  bool of_driver = false;  ///< Made by the driver, not mapped and registered.
};

/// @brief Where segments come from; adaptors wrap another resource.
///
/// Not synchronised: the lock of the pool above guards the whole stack.
class SegmentResource {
 public:
  virtual ~SegmentResource() = default;

  /// A segment of `nbytes`, a multiple of 2 MiB.
  /// @throws HostMemoryError
  virtual Segment allocate(std::size_t nbytes) = 0;

  /// Gives a segment back. False where its driver refused: the segment is then lost.
  virtual bool deallocate(const Segment& segment) noexcept = 0;

  /// The most bytes that allocate() would not refuse by a rule of its own.
  virtual std::size_t room() { return std::numeric_limits<std::size_t>::max(); }
};

}  // namespace lowpeak::host
