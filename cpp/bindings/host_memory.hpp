#pragma once

#include <pybind11/pybind11.h>

/// Registers the pool of host memory, its blocks and its errors.
void bind_host_memory(pybind11::module_& m);
