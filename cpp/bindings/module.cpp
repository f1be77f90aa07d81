#include <pybind11/pybind11.h>

#include "lowpeak/build_info.hpp"

namespace py = pybind11;

namespace {

py::dict build_info() {
  const lowpeak::BuildInfo& info = lowpeak::build_info();
  py::dict result;
  result["version"] = info.version;
  result["compiler"] = info.compiler;
  result["cxx_standard"] = info.cxx_standard;
  result["build_type"] = info.build_type;
  result["sanitized"] = info.sanitized;
  return result;
}

}  // namespace

PYBIND11_MODULE(_native, m, py::mod_gil_not_used()) {
  m.doc() = "Native part of lowpeak: no libtorch, no CUDA runtime.";
  m.def("build_info", &build_info, "How the extension was built.");
}
