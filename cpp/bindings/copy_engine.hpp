#pragma once

#include <pybind11/pybind11.h>

/// Registers the copy engine, the ends of its copies and its errors; after bind_host_memory().
void bind_copy_engine(pybind11::module_& m);
