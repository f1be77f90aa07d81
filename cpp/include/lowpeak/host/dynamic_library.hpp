#pragma once

#include <dlfcn.h>

#include <string>
#include <vector>

#include "lowpeak/host/error.hpp"

namespace lowpeak::host {

/// @brief A shared library opened at run time, and never closed: its driver outlives every caller.
class DynamicLibrary {
 public:
  /// Opens the first of `names` that is there; one that the process has loaded already goes first,
  /// for two copies of a runtime do not share their state.
  /// @throws BackendError with the loader's words where there is none.
  explicit DynamicLibrary(const std::vector<std::string>& names) {
    for (const int mode : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
      for (const std::string& name : names) {
        handle_ = dlopen(name.c_str(), mode | RTLD_LOCAL);
        if (handle_ != nullptr) {
          name_ = name;
          return;
        }
        if (mode == RTLD_NOW && error_.empty()) error_ = dlerror();
      }
    }
    throw BackendError(error_);
  }

  /// Sets `function` to what the library exports under `symbol`.
  /// @throws BackendError where it exports no such thing.
  template <typename Function>
  void load(const char* symbol, Function*& function) const {
    load_if_there(symbol, function);
    if (function == nullptr) throw BackendError(name_ + " has no " + symbol);
  }

  /// The same; null where the library exports no such thing.
  template <typename Function>
  void load_if_there(const char* symbol, Function*& function) const {
    function = reinterpret_cast<Function*>(dlsym(handle_, symbol));
  }

 private:
  void* handle_ = nullptr;
  std::string name_;
  std::string error_;
};

}  // namespace lowpeak::host
