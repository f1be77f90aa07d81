#include "copy_engine.hpp"

#include <cstdint>
#include <memory>
#include <string>

#include "host_memory.hpp"
#include "lowpeak/copy/backends.hpp"
#include "lowpeak/copy/copy_engine.hpp"

namespace py = pybind11;

namespace {

using lowpeak::copy::CopyEngine;
using lowpeak::copy::Rooms;
using lowpeak::copy::Stream;
using lowpeak::copy::Ticket;
using Unlocked = py::call_guard<py::gil_scoped_release>;

/// The end of a copy as an object of Python.
struct Copy {
  Ticket ticket;
};

std::unique_ptr<CopyEngine> make_engine(const Pool& pool, const std::string& backend, int device,
                                        const std::string& mode, std::uint64_t seed, bool beside) {
  return std::make_unique<CopyEngine>(
      pool.shared, lowpeak::copy::make_streams(backend, device, mode, seed), beside);
}

py::dict statistics(CopyEngine& engine) {
  lowpeak::copy::CopyStatistics all;
  {
    const py::gil_scoped_release unlocked;
    all = engine.statistics();
  }
  py::dict result;
  result["copies_out"] = all.copies_out;
  result["copies_in"] = all.copies_in;
  result["bytes_out"] = all.bytes_out;
  result["bytes_in"] = all.bytes_in;
  result["plain_bytes_out"] = all.plain_bytes_out;
  result["plain_bytes_in"] = all.plain_bytes_in;
  result["transfers"] = all.transfers;
  result["handovers"] = all.handovers;
  result["failures"] = all.failures;
  result["events"] = all.events;
  result["leaving"] = all.leaving;
  result["ring_bytes"] = all.ring_bytes;
  result["plain_reserved_bytes"] = all.plain_reserved_bytes;
  result["plain_live_bytes"] = all.plain_live_bytes;
  return result;
}

}  // namespace

void bind_copy_engine(py::module_& m) {
  py::register_local_exception<lowpeak::copy::CopyError>(m, "CopyError", PyExc_RuntimeError);
  py::class_<Copy>(m, "NativeCopy", py::release_gil_before_calling_cpp_dtor(),
                   "The end of a copy.");
  py::class_<CopyEngine>(m, "CopyEngine", py::release_gil_before_calling_cpp_dtor(),
                         "Copies between a device and a HostPool, by addresses, sizes and handles "
                         "of streams; see lowpeak.offload.native_engine.")
      .def(py::init(&make_engine), Unlocked(), py::kw_only(), py::arg("pool"), py::arg("backend"),
           py::arg("device"), py::arg("mode"), py::arg("seed"), py::arg("beside"))
      .def("allocate", &CopyEngine::allocate, Unlocked(), py::arg("nbytes"),
           py::arg("may_grow") = true)
      .def("allocate_plain", &CopyEngine::allocate_plain, Unlocked(), py::arg("nbytes"))
      .def("reserve_ring", &CopyEngine::reserve_ring, Unlocked())
      .def("begin_step", &CopyEngine::begin_step, Unlocked(), py::arg("idle_steps"))
      .def("release", &CopyEngine::release, Unlocked(), py::arg("room"))
      .def(
          "copy_out",
          [](CopyEngine& engine, Rooms::Id room, std::uintptr_t source, std::size_t nbytes,
             Stream current) { return Copy{engine.copy_out(room, source, nbytes, current)}; },
          Unlocked(), py::arg("room"), py::arg("source"), py::arg("nbytes"), py::arg("current"))
      .def(
          "copy_in",
          [](CopyEngine& engine, Rooms::Id room, std::uintptr_t target, std::size_t nbytes,
             Stream current, const Copy& after) {
            return Copy{engine.copy_in(room, target, nbytes, current, after.ticket)};
          },
          Unlocked(), py::arg("room"), py::arg("target"), py::arg("nbytes"), py::arg("current"),
          py::arg("after"))
      .def(
          "done", [](CopyEngine& engine, const Copy& copy) { return engine.done(copy.ticket); },
          Unlocked(), py::arg("copy"))
      .def(
          "wait",
          [](CopyEngine& engine, const Copy& copy, Stream current) {
            engine.wait(copy.ticket, current);
          },
          Unlocked(), py::arg("copy"), py::arg("current"))
      .def("follow", &CopyEngine::follow, Unlocked(), py::arg("current"), py::arg("marked"))
      .def("synchronize", &CopyEngine::synchronize, Unlocked())
      .def("statistics", &statistics)
      .def(
          "fail_next",
          [](CopyEngine& engine, const std::string& site, std::uint64_t skip, std::uint64_t times,
             bool loses) { engine.fail(lowpeak::copy::copy_site_named(site), skip, times, loses); },
          Unlocked(), py::arg("site"), py::arg("skip") = 0, py::arg("times") = 1,
          py::arg("loses") = false);
}
