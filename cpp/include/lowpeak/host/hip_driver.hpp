#pragma once

#include <array>
#include <string>

#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/dynamic_library.hpp"
#include "lowpeak/host/numa.hpp"

namespace lowpeak::host {

/// @brief AMD's HIP runtime, opened at run time.
///
/// torch for ROCm brings a copy under the plain name, system installs have one with a number: the
/// one that is loaded is taken. HIP keeps a current device a thread, which each call puts back.
class HipDriver final : public Driver {
 public:
  /// @throws BackendError where there is no runtime, no such device, or the runtime does not start.
  explicit HipDriver(int device)
      : library_({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"}), device_(device) {
    int (*init)(unsigned) = nullptr;
    int (*count)(int*) = nullptr;
    library_.load("hipGetErrorString", error_string_);
    library_.load("hipInit", init);
    library_.load("hipGetDeviceCount", count);
    library_.load("hipDeviceGetPCIBusId", pci_bus_id_);
    library_.load("hipGetDevice", get_device_);
    library_.load("hipSetDevice", set_device_);
    library_.load("hipHostRegister", register_);
    library_.load("hipHostUnregister", unregister_);
    library_.load("hipHostMalloc", allocate_);
    library_.load("hipHostFree", free_);
    int devices = 0;
    require("hipInit", init(0));
    require("hipGetDeviceCount", count(&devices));
    if (device < 0 || device >= devices) {
      throw BackendError("there is no HIP device " + std::to_string(device) + ", only " +
                         std::to_string(devices));
    }
  }

  const char* name() const noexcept override { return "hip"; }
  bool pins() const noexcept override { return true; }

  int numa_node() const override {
    std::array<char, 32> id{};
    if (pci_bus_id_(id.data(), static_cast<int>(id.size()) - 1, device_) != 0) return -1;
    return node_of_pci_device(id.data());
  }

  Outcome register_host(void* data, std::size_t nbytes) override {
    return on_device("hipHostRegister", [&] { return register_(data, nbytes, portable); });
  }

  Outcome unregister_host(void* data) override {
    return on_device("hipHostUnregister", [&] { return unregister_(data); });
  }

  Outcome allocate_host(std::size_t nbytes, void** data) override {
    return on_device("hipHostMalloc", [&] { return allocate_(data, nbytes, portable); });
  }

  Outcome free_host(void* data) override {
    return on_device("hipHostFree", [&] { return free_(data); });
  }

 private:
  static constexpr unsigned portable = 1;  // hipHostRegisterPortable, hipHostMallocPortable

  std::string said(const char* call, int code) const {
    const char* text = error_string_(code);
    return std::string(call) + ": HIP error " + std::to_string(code) + ", " +
           (text == nullptr ? "unknown" : text);
  }

  void require(const char* call, int code) const {
    if (code != 0) throw BackendError(said(call, code));
  }

  template <typename Call>
  Outcome on_device(const char* name, Call call) const {
    int before = device_;
    int code = get_device_(&before);
    if (code == 0) code = set_device_(device_);
    if (code != 0) return {false, said("hipSetDevice", code)};
    code = call();
    set_device_(before);
    return code == 0 ? Outcome{} : Outcome{false, said(name, code)};
  }

  DynamicLibrary library_;
  int device_;
  const char* (*error_string_)(int) = nullptr;
  int (*pci_bus_id_)(char*, int, int) = nullptr;
  int (*get_device_)(int*) = nullptr;
  int (*set_device_)(int) = nullptr;
  int (*register_)(void*, std::size_t, unsigned) = nullptr;
  int (*unregister_)(void*) = nullptr;
  int (*allocate_)(void**, std::size_t, unsigned) = nullptr;
  int (*free_)(void*) = nullptr;
};

}  // namespace lowpeak::host
