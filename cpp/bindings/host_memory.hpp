#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "lowpeak/host/host_pool.hpp"

/// The pool behind a shared pointer that blocks and copy engines hold too: it goes with the last.
struct Pool {
  std::shared_ptr<lowpeak::host::HostPool> shared;
  std::string why_null;
};

/// Registers the pool of host memory, its blocks and its errors.
void bind_host_memory(pybind11::module_& m);
