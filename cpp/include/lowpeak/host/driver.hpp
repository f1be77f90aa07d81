#pragma once

#include <cstddef>
#include <string>

namespace lowpeak::host {

/// @brief What a driver answered: success, or the text of its error.
struct Outcome {
  bool ok = true;
  std::string error;
  bool device_lost = false;  ///< No later call of this process can succeed.
};

/// @brief What host memory needs of a device's driver: one table, one implementation a backend.
///
/// Addresses and sizes are multiples of 2 MiB. Calls come from one thread at a time for a pool,
/// from several for several pools.
class Driver {
 public:
  virtual ~Driver() = default;

  virtual const char* name() const noexcept = 0;

  /// Whether register_host() lets a device copy from and to the memory at full speed.
  virtual bool pins() const noexcept = 0;

  /// Whether memory given back is overwritten at once, so that a late reader sees it.
  virtual bool poisons() const noexcept { return false; }

  /// Whether the device's memory is the host's: then copying to the host saves nothing.
  virtual bool integrated() const { return false; }

  /// The NUMA node that the device is attached to, -1 where that is not known.
  virtual int numa_node() const { return -1; }

  /// Locks the pages of [data, data + nbytes) in place, for all devices.
  virtual Outcome register_host(void* data, std::size_t nbytes) = 0;

  virtual Outcome unregister_host(void* data) = 0;

  /// Memory of the driver's own making, where register_host() does not work.
  virtual Outcome allocate_host(std::size_t nbytes, void** data) = 0;

  virtual Outcome free_host(void* data) = 0;
};

}  // namespace lowpeak::host
