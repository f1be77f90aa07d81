#pragma once

#include <array>
#include <cstddef>

#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/dynamic_call.hpp"
#include "lowpeak/host/numa.hpp"

namespace lowpeak::host {

/// @brief Host memory by the driver of a vendor whose calls `Vendor` names.
///
/// CUDA and HIP agree on what these functions take, return and mean.
template <typename Vendor>
class VendorDriver final : public Driver {
 public:
  /// @throws BackendError where there is no driver, no such device, or the driver does not start.
  explicit VendorDriver(int device) : context_(device) {
    context_.load(Vendor::attribute.symbol, attribute_);
    context_.load(Vendor::pci_bus_id.symbol, pci_bus_id_);
    context_.load(Vendor::register_host.symbol, register_);
    context_.load(Vendor::unregister_host.symbol, unregister_);
    context_.load(Vendor::allocate_host.symbol, allocate_);
    context_.load(Vendor::free_host.symbol, free_);
  }

  const char* name() const noexcept override { return Vendor::name; }
  bool pins() const noexcept override { return true; }

  bool integrated() const override {
    int value = 0;
    return attribute_(&value, Vendor::integrated_attribute, context_.device()) == 0 && value != 0;
  }

  int numa_node() const override {
    std::array<char, 32> id{};
    const int size = static_cast<int>(id.size()) - 1;
    return pci_bus_id_(id.data(), size, context_.device()) == 0 ? node_of_pci_device(id.data())
                                                                : -1;
  }

  Outcome register_host(void* data, std::size_t nbytes) override {
    return context_.run(Vendor::register_host.name,
                        [&] { return register_(data, nbytes, portable); });
  }

  Outcome unregister_host(void* data) override {
    return context_.run(Vendor::unregister_host.name, [&] { return unregister_(data); });
  }

  Outcome allocate_host(std::size_t nbytes, void** data) override {
    return context_.run(Vendor::allocate_host.name,
                        [&] { return allocate_(data, nbytes, portable); });
  }

  Outcome free_host(void* data) override {
    return context_.run(Vendor::free_host.name, [&] { return free_(data); });
  }

 private:
  // CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE, hipHostRegisterPortable,
  // hipHostMallocPortable
  static constexpr unsigned portable = 1;

  typename Vendor::Context context_;
  int (*attribute_)(int*, int, int) = nullptr;
  int (*pci_bus_id_)(char*, int, int) = nullptr;
  int (*register_)(void*, std::size_t, unsigned) = nullptr;
  int (*unregister_)(void*) = nullptr;
  int (*allocate_)(void**, std::size_t, unsigned) = nullptr;
  int (*free_)(void*) = nullptr;
};

}  // namespace lowpeak::host
