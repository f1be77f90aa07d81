#pragma once

#include <array>
#include <string>

#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/dynamic_library.hpp"
#include "lowpeak/host/numa.hpp"

namespace lowpeak::host {

/// @brief CUDA's driver API, opened at run time: one build serves every CUDA, and none.
///
/// The symbols are those of CUDA 7.0, whose names keep their meaning in every later driver.
/// The device's primary context, which the CUDA runtime and torch use too, is retained and never
/// released.
class CudaDriver final : public Driver {
 public:
  /// @throws BackendError where there is no driver, no such device, or the driver does not start.
  explicit CudaDriver(int device) : library_({"libcuda.so.1"}) {
    int (*init)(unsigned) = nullptr;
    int (*device_get)(int*, int) = nullptr;
    int (*retain)(Context*, int) = nullptr;
    library_.load("cuGetErrorString", error_string_);
    library_.load("cuInit", init);
    library_.load("cuDeviceGet", device_get);
    library_.load("cuDevicePrimaryCtxRetain", retain);
    library_.load("cuDeviceGetPCIBusId", pci_bus_id_);
    library_.load("cuCtxPushCurrent_v2", push_);
    library_.load("cuCtxPopCurrent_v2", pop_);
    library_.load("cuMemHostRegister_v2", register_);
    library_.load("cuMemHostUnregister", unregister_);
    library_.load("cuMemHostAlloc", allocate_);
    library_.load("cuMemFreeHost", free_);
    require("cuInit", init(0));
    require("cuDeviceGet", device_get(&device_, device));
    require("cuDevicePrimaryCtxRetain", retain(&context_, device_));
  }

  const char* name() const noexcept override { return "cuda"; }
  bool pins() const noexcept override { return true; }

  int numa_node() const override {
    std::array<char, 32> id{};
    if (pci_bus_id_(id.data(), static_cast<int>(id.size()) - 1, device_) != 0) return -1;
    return node_of_pci_device(id.data());
  }

  Outcome register_host(void* data, std::size_t nbytes) override {
    return in_context("cuMemHostRegister", [&] { return register_(data, nbytes, portable); });
  }

  Outcome unregister_host(void* data) override {
    return in_context("cuMemHostUnregister", [&] { return unregister_(data); });
  }

  Outcome allocate_host(std::size_t nbytes, void** data) override {
    return in_context("cuMemHostAlloc", [&] { return allocate_(data, nbytes, portable); });
  }

  Outcome free_host(void* data) override {
    return in_context("cuMemFreeHost", [&] { return free_(data); });
  }

 private:
  using Context = void*;
  static constexpr unsigned portable = 1;  // CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTALLOC_PORTABLE

  std::string said(const char* call, int code) const {
    const char* text = nullptr;
    error_string_(code, &text);
    return std::string(call) + ": CUDA error " + std::to_string(code) + ", " +
           (text == nullptr ? "unknown" : text);
  }

  void require(const char* call, int code) const {
    if (code != 0) throw BackendError(said(call, code));
  }

  /// Makes the context current for one call only: the thread may be anybody's.
  template <typename Call>
  Outcome in_context(const char* name, Call call) const {
    int code = push_(context_);
    if (code != 0) return {false, said("cuCtxPushCurrent", code)};
    code = call();
    Context popped = nullptr;
    pop_(&popped);
    return code == 0 ? Outcome{} : Outcome{false, said(name, code)};
  }

  DynamicLibrary library_;
  int device_ = 0;
  Context context_ = nullptr;
  int (*error_string_)(int, const char**) = nullptr;
  int (*pci_bus_id_)(char*, int, int) = nullptr;
  int (*push_)(Context) = nullptr;
  int (*pop_)(Context*) = nullptr;
  int (*register_)(void*, std::size_t, unsigned) = nullptr;
  int (*unregister_)(void*) = nullptr;
  int (*allocate_)(void**, std::size_t, unsigned) = nullptr;
  int (*free_)(void*) = nullptr;
};

}  // namespace lowpeak::host
