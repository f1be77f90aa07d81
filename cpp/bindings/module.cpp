#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <vector>

#include "lowpeak/build_info.hpp"
#include "lowpeak/packing.hpp"

#ifdef LOWPEAK_HOST_MEMORY
#include "copy_engine.hpp"
#include "host_memory.hpp"
#endif

namespace py = pybind11;

namespace {

using Integers = py::array_t<std::int64_t, py::array::c_style>;

py::dict build_info() {
  const lowpeak::BuildInfo& info = lowpeak::build_info();
  py::dict result;
  result["version"] = info.version;
  result["compiler"] = info.compiler;
  result["cxx_standard"] = info.cxx_standard;
  result["build_type"] = info.build_type;
  result["sanitizers"] = info.sanitizers;
  return result;
}

Integers copied(const std::vector<std::int64_t>& values) {
  return Integers(static_cast<py::ssize_t>(values.size()), values.data());
}

py::tuple best_fit_decreasing(const Integers& lengths, std::int64_t capacity) {
  if (lengths.ndim() != 1) throw py::value_error("lengths must have one dimension");
  // A copy: without the GIL another thread might write to the array between check and use.
  const std::vector<std::int64_t> own(lengths.data(), lengths.data() + lengths.size());
  lowpeak::Packing packing;
  {
    py::gil_scoped_release unlocked;
    packing = lowpeak::best_fit_decreasing(own.data(), own.size(), capacity);
  }
  return py::make_tuple(copied(packing.items), copied(packing.offsets));
}

/// What the standard library throws. Without this, pybind11 asks the modules that were loaded
/// before, torch's among them, which would throw our exceptions again by their own libstdc++.
void translate_standard_exceptions() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const py::builtin_exception& error) {
      error.set_error();
    } catch (const py::error_already_set&) {
      throw;  // pybind11 restores it itself
    } catch (const std::bad_alloc& error) {
      py::set_error(PyExc_MemoryError, error.what());
    } catch (const std::invalid_argument& error) {
      py::set_error(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
      py::set_error(PyExc_RuntimeError, error.what());
    }
  });
}

}  // namespace

PYBIND11_MODULE(_native, m, py::mod_gil_not_used()) {
  m.doc() = "Native part of lowpeak: no libtorch, no CUDA runtime.";
  translate_standard_exceptions();
  m.def("build_info", &build_info, "How the extension was built.");
  m.def("best_fit_decreasing", &best_fit_decreasing, py::arg("lengths").noconvert(),
        py::arg("capacity"), "Items bin after bin, and where each bin begins.");
#ifdef LOWPEAK_HOST_MEMORY
  bind_host_memory(m);
  bind_copy_engine(m);
#endif
}
