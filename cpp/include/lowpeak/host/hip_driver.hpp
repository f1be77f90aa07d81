#pragma once

#include <array>

#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/hip_context.hpp"
#include "lowpeak/host/numa.hpp"

namespace lowpeak::host {

/// @brief Host memory by AMD's HIP runtime.
class HipDriver final : public Driver {
 public:
  /// @throws BackendError where there is no runtime, no such device, or the runtime does not start.
  explicit HipDriver(int device) : context_(device) {
    context_.load("hipDeviceGetPCIBusId", pci_bus_id_);
    context_.load("hipHostRegister", register_);
    context_.load("hipHostUnregister", unregister_);
    context_.load("hipHostMalloc", allocate_);
    context_.load("hipHostFree", free_);
  }

  const char* name() const noexcept override { return "hip"; }
  bool pins() const noexcept override { return true; }

  int numa_node() const override {
    std::array<char, 32> id{};
    const int size = static_cast<int>(id.size()) - 1;
    return pci_bus_id_(id.data(), size, context_.device()) == 0 ? node_of_pci_device(id.data())
                                                                : -1;
  }

  Outcome register_host(void* data, std::size_t nbytes) override {
    return context_.run("hipHostRegister", [&] { return register_(data, nbytes, portable); });
  }

  Outcome unregister_host(void* data) override {
    return context_.run("hipHostUnregister", [&] { return unregister_(data); });
  }

  Outcome allocate_host(std::size_t nbytes, void** data) override {
    return context_.run("hipHostMalloc", [&] { return allocate_(data, nbytes, portable); });
  }

  Outcome free_host(void* data) override {
    return context_.run("hipHostFree", [&] { return free_(data); });
  }

 private:
  static constexpr unsigned portable = 1;  // hipHostRegisterPortable, hipHostMallocPortable

  HipContext context_;
  int (*pci_bus_id_)(char*, int, int) = nullptr;
  int (*register_)(void*, std::size_t, unsigned) = nullptr;
  int (*unregister_)(void*) = nullptr;
  int (*allocate_)(void**, std::size_t, unsigned) = nullptr;
  int (*free_)(void*) = nullptr;
};

}  // namespace lowpeak::host
