#pragma once

#include <string>

#include "lowpeak/host/cuda_context.hpp"
#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/dynamic_library.hpp"

namespace lowpeak::host {

/// @brief AMD's HIP runtime, opened at run time, and one device of it.
///
/// torch for ROCm brings a copy under the plain name, system installs have one with a number: the
/// one that is loaded is taken. HIP keeps a current device a thread, which each call puts back.
class HipContext {
 public:
  /// @throws BackendError where there is no runtime, no such device, or the runtime does not start.
  explicit HipContext(int device)
      : library_({"libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"}), device_(device) {
    int (*init)(unsigned) = nullptr;
    int (*count)(int*) = nullptr;
    library_.load("hipGetErrorString", error_string_);
    library_.load("hipInit", init);
    library_.load("hipGetDeviceCount", count);
    library_.load("hipGetDevice", get_device_);
    library_.load("hipSetDevice", set_device_);
    int devices = 0;
    require("hipInit", init(0));
    require("hipGetDeviceCount", count(&devices));
    if (device < 0 || device >= devices) {
      throw BackendError("there is no HIP device " + std::to_string(device) + ", only " +
                         std::to_string(devices));
    }
  }

  int device() const noexcept { return device_; }

  /// @throws BackendError where the runtime has no such symbol.
  template <typename Function>
  void load(const char* symbol, Function*& function) const {
    library_.load(symbol, function);
  }

  /// Null where the runtime has no such symbol.
  template <typename Function>
  void load_if_there(const char* symbol, Function*& function) const {
    library_.load_if_there(symbol, function);
  }

  /// Makes the device current for one call only.
  template <typename Call>
  Outcome run(const char* name, Call call) const {
    int before = device_;
    int code = get_device_(&before);
    if (code == 0) code = set_device_(device_);
    if (code != 0) return failed("hipSetDevice", code);
    code = call();
    set_device_(before);
    return code == 0 ? Outcome{} : failed(name, code);
  }

 private:
  std::string said(const char* call, int code) const {
    const char* text = error_string_(code);
    return std::string(call) + ": HIP error " + std::to_string(code) + ", " +
           (text == nullptr ? "unknown" : text);
  }

  Outcome failed(const char* call, int code) const {
    return {false, said(call, code), loses_device(code)};
  }

  void require(const char* call, int code) const {
    if (code != 0) throw BackendError(said(call, code));
  }

  DynamicLibrary library_;
  int device_;
  const char* (*error_string_)(int) = nullptr;
  int (*get_device_)(int*) = nullptr;
  int (*set_device_)(int) = nullptr;
};

}  // namespace lowpeak::host
