#pragma once

#include <string>

#include "lowpeak/host/driver.hpp"
#include "lowpeak/host/dynamic_library.hpp"

namespace lowpeak::host {

/// Whether a code of CUDA or HIP, which share these, means that the device is lost to the process.
inline bool loses_device(int code) noexcept {
  switch (code) {
    case 4:    // deinitialized
    case 214:  // uncorrectable ECC error
    case 220:  // uncorrectable NVLink error
    case 700:  // illegal address
    case 702:  // launch timeout
    case 709:  // context is destroyed
    case 710:  // assert
    case 714:  // hardware stack error
    case 715:  // illegal instruction
    case 716:  // misaligned address
    case 717:  // invalid address space
    case 718:  // invalid program counter
    case 719:  // launch failed
    case 999:  // unknown
      return true;
    default:
      return false;
  }
}

/// @brief CUDA's driver API, opened at run time, and the primary context of one device.
///
/// The CUDA runtime and torch use the same context; it is retained and never released.
class CudaContext {
 public:
  /// @throws BackendError where there is no driver, no such device, or the driver does not start.
  explicit CudaContext(int device) : library_({"libcuda.so.1"}) {
    int (*init)(unsigned) = nullptr;
    int (*device_get)(int*, int) = nullptr;
    int (*retain)(Context*, int) = nullptr;
    library_.load("cuGetErrorString", error_string_);
    library_.load("cuInit", init);
    library_.load("cuDeviceGet", device_get);
    library_.load("cuDevicePrimaryCtxRetain", retain);
    library_.load("cuCtxPushCurrent_v2", push_);
    library_.load("cuCtxPopCurrent_v2", pop_);
    require("cuInit", init(0));
    require("cuDeviceGet", device_get(&device_, device));
    require("cuDevicePrimaryCtxRetain", retain(&context_, device_));
  }

  int device() const noexcept { return device_; }

  /// @throws BackendError where the driver has no such symbol.
  template <typename Function>
  void load(const char* symbol, Function*& function) const {
    library_.load(symbol, function);
  }

  /// Null where the driver has no such symbol.
  template <typename Function>
  void load_if_there(const char* symbol, Function*& function) const {
    library_.load_if_there(symbol, function);
  }

  /// Makes the context current for one call only: the thread may be anybody's.
  template <typename Call>
  Outcome run(const char* name, Call call) const {
    int code = push_(context_);
    if (code != 0) return failed("cuCtxPushCurrent", code);
    code = call();
    Context popped = nullptr;
    pop_(&popped);
    return code == 0 ? Outcome{} : failed(name, code);
  }

 private:
  using Context = void*;

  std::string said(const char* call, int code) const {
    const char* text = nullptr;
    error_string_(code, &text);
    return std::string(call) + ": CUDA error " + std::to_string(code) + ", " +
           (text == nullptr ? "unknown" : text);
  }

  Outcome failed(const char* call, int code) const {
    return {false, said(call, code), loses_device(code)};
  }

  void require(const char* call, int code) const {
    if (code != 0) throw BackendError(said(call, code));
  }

  DynamicLibrary library_;
  int device_ = 0;
  Context context_ = nullptr;
  int (*error_string_)(int, const char**) = nullptr;
  int (*push_)(Context) = nullptr;
  int (*pop_)(Context*) = nullptr;
};

}  // namespace lowpeak::host
