#pragma once

#include <array>

#include "lowpeak/host/cuda_context.hpp"
#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/numa.hpp"

namespace lowpeak::host {

/// @brief Host memory by CUDA's driver API: one build serves every CUDA, and none.
///
/// The symbols are those of CUDA 7.0, whose names keep their meaning in every later driver.
class CudaDriver final : public Driver {
 public:
  /// @throws BackendError where there is no driver, no such device, or the driver does not start.
  explicit CudaDriver(int device) : context_(device) {
    context_.load("cuDeviceGetPCIBusId", pci_bus_id_);
    context_.load("cuMemHostRegister_v2", register_);
    context_.load("cuMemHostUnregister", unregister_);
    context_.load("cuMemHostAlloc", allocate_);
    context_.load("cuMemFreeHost", free_);
  }

  const char* name() const noexcept override { return "cuda"; }
  bool pins() const noexcept override { return true; }

  int numa_node() const override {
    std::array<char, 32> id{};
    const int size = static_cast<int>(id.size()) - 1;
    return pci_bus_id_(id.data(), size, context_.device()) == 0 ? node_of_pci_device(id.data())
                                                                : -1;
  }

  Outcome register_host(void* data, std::size_t nbytes) override {
    return context_.run("cuMemHostRegister", [&] { return register_(data, nbytes, portable); });
  }

  Outcome unregister_host(void* data) override {
    return context_.run("cuMemHostUnregister", [&] { return unregister_(data); });
  }

  Outcome allocate_host(std::size_t nbytes, void** data) override {
    return context_.run("cuMemHostAlloc", [&] { return allocate_(data, nbytes, portable); });
  }

  Outcome free_host(void* data) override {
    return context_.run("cuMemFreeHost", [&] { return free_(data); });
  }

 private:
  static constexpr unsigned portable = 1;  // CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE

  CudaContext context_;
  int (*pci_bus_id_)(char*, int, int) = nullptr;
  int (*register_)(void*, std::size_t, unsigned) = nullptr;
  int (*unregister_)(void*) = nullptr;
  int (*allocate_)(void**, std::size_t, unsigned) = nullptr;
  int (*free_)(void*) = nullptr;
};

}  // namespace lowpeak::host
