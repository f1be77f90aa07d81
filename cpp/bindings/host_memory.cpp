#include "host_memory.hpp"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dlpack.hpp"
#include "lowpeak/host/backends.hpp"
#include "lowpeak/host/block.hpp"

namespace py = pybind11;

namespace {

using lowpeak::host::Block;
using lowpeak::host::HostPool;
using Unlocked = py::call_guard<py::gil_scoped_release>;

Pool make_pool(const std::string& backend, int device, std::size_t segment_bytes,
               std::size_t extent_bytes, std::size_t low_water_bytes,
               std::optional<std::size_t> limit, std::size_t local_ranks,
               std::optional<int> numa_node, std::size_t threads) {
  lowpeak::host::HostPoolOptions options;
  options.pool = {segment_bytes, extent_bytes, low_water_bytes};
  options.budget.limit = limit;
  options.budget.local_ranks = local_ranks;
  options.numa_node = numa_node;
  options.threads = threads;
  Pool pool;
  auto driver = lowpeak::host::make_driver(backend, device, &pool.why_null);
  pool.shared = std::make_shared<HostPool>(std::move(driver), options);
  return pool;
}

py::dict statistics(const Pool& pool) {
  lowpeak::host::HostPoolStatistics all;
  {
    const py::gil_scoped_release unlocked;
    all = pool.shared->statistics();
  }
  py::dict result;
  result["backend"] = pool.shared->driver().name();
  result["pinned"] = pool.shared->driver().pins();
  result["integrated"] = pool.shared->driver().integrated();
  result["numa_node"] = all.numa_node;
  result["budget_bytes"] = all.budget;
  result["reserved_bytes"] = all.pool.reserved;
  result["used_bytes"] = all.pool.used;
  result["live_bytes"] = all.pool.live;
  result["peak_reserved_bytes"] = all.pool.peak_reserved;
  result["peak_live_bytes"] = all.pool.peak_live;
  result["leaked_bytes"] = all.pin.leaked_bytes;
  result["segments"] = all.pool.segments;
  result["blocks"] = all.pool.allocations;
  result["growths"] = all.pool.growths;
  result["trimmed_segments"] = all.pool.trimmed_segments;
  result["idle_segments"] = all.pool.idle_segments;
  result["refusals"] = all.pool.refusals;
  result["pin_seconds"] = all.pin.pin_seconds;
  result["driver_calls"] = all.pin.driver_calls;
  result["map_failures"] = all.pin.map_failures;
  result["thread_failures"] = all.pin.thread_failures;
  result["register_failures"] = all.pin.register_failures;
  result["driver_allocation_failures"] = all.pin.driver_allocation_failures;
  result["small_page_segments"] = all.pin.small_page_segments;
  result["driver_segments"] = all.pin.driver_segments;
  result["unplaced_segments"] = all.pin.unplaced_segments;
  return result;
}

std::vector<std::pair<std::uintptr_t, std::size_t>> runs(const Pool& pool, HostPool::Id id) {
  std::vector<std::pair<std::uintptr_t, std::size_t>> result;
  for (const auto& run : pool.shared->runs(id)) {
    result.emplace_back(reinterpret_cast<std::uintptr_t>(run.data), run.nbytes);
  }
  return result;
}

/// `version` is what the consumer understands: without one, or below 1.0, the old structure.
py::capsule dlpack_capsule(const std::shared_ptr<Block>& block, const py::object& stream,
                           const std::optional<std::pair<int, int>>& version,
                           const std::optional<std::pair<int, int>>& device,
                           std::optional<bool> copy) {
  if (!stream.is_none()) throw py::value_error("stream must be None: the block is on the host");
  if (device && *device != std::pair(1, 0)) {
    throw py::buffer_error("dl_device must be (1, 0): the block is on the host");
  }
  if (copy.value_or(false)) throw py::buffer_error("copy=True: copy the block yourself");
  return version && version->first >= 1 ? dlpack::exported<dlpack::ManagedVersioned>(block)
                                        : dlpack::exported<dlpack::Managed>(block);
}

void bind_block(py::module_& m) {
  py::class_<Block, std::shared_ptr<Block>>(m, "PinnedBlock", py::buffer_protocol(),
                                            py::release_gil_before_calling_cpp_dtor(),
                                            "Contiguous host memory of a PinnedPool.")
      .def_property_readonly("nbytes", &Block::nbytes)
      .def_property_readonly(
          "address",
          [](const Block& block) { return reinterpret_cast<std::uintptr_t>(block.data()); })
      .def_property_readonly("pinned",
                             [](const Block& block) { return block.pool().driver().pins(); })
      .def("__len__", &Block::nbytes)
      .def("__repr__",
           [](const Block& block) {
             return "<PinnedBlock of " + std::to_string(block.nbytes()) + " bytes>";
           })
      .def_buffer([](const Block& block) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(block.data()),
                               static_cast<py::ssize_t>(block.nbytes()));
      })
      .def("__dlpack_device__", [](const Block&) { return py::make_tuple(1, 0); })
      .def("__dlpack__", &dlpack_capsule, py::kw_only(), py::arg("stream") = py::none(),
           py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(),
           py::arg("copy") = py::none());
}

void bind_pool(py::module_& m) {
  py::class_<Pool>(m, "HostPool", py::release_gil_before_calling_cpp_dtor(),
                   "Host memory by addresses and sizes; see lowpeak.offload.PinnedPool.")
      .def(py::init(&make_pool), Unlocked(), py::kw_only(), py::arg("backend"), py::arg("device"),
           py::arg("segment_bytes"), py::arg("extent_bytes"), py::arg("low_water_bytes"),
           py::arg("limit_bytes"), py::arg("local_ranks"), py::arg("numa_node"), py::arg("threads"))
      .def_readonly("why_null", &Pool::why_null)
      .def(
          "allocate_block",
          [](const Pool& pool, std::size_t nbytes) {
            return std::make_shared<Block>(pool.shared, nbytes);
          },
          Unlocked(), py::arg("nbytes"))
      .def(
          "allocate_record",
          [](const Pool& pool, std::size_t nbytes) { return pool.shared->allocate_record(nbytes); },
          Unlocked(), py::arg("nbytes"))
      .def("runs", &runs, Unlocked(), py::arg("record"))
      .def(
          "release", [](const Pool& pool, HostPool::Id id) { pool.shared->release(id); },
          Unlocked(), py::arg("record"))
      .def(
          "trim",
          [](const Pool& pool, std::optional<std::size_t> keep) { return pool.shared->trim(keep); },
          Unlocked(), py::arg("keep_bytes"))
      .def(
          "close", [](const Pool& pool) { pool.shared->close(); }, Unlocked())
      .def("statistics", &statistics)
      .def(
          "fail_next",
          [](const Pool& pool, const std::string& site, std::uint64_t skip, std::uint64_t times) {
            pool.shared->fail(lowpeak::host::site_named(site), skip, times);
          },
          Unlocked(), py::arg("site"), py::arg("skip") = 0, py::arg("times") = 1);
}

}  // namespace

void bind_host_memory(py::module_& m) {
  py::register_local_exception<lowpeak::host::HostMemoryError>(m, "HostMemoryError",
                                                               PyExc_RuntimeError);
  py::register_local_exception<lowpeak::host::BackendError>(m, "BackendError", PyExc_RuntimeError);
  bind_block(m);
  bind_pool(m);
  // Python ends before exit() runs its handlers, and may destroy pools in between.
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&lowpeak::host::ProcessGuard::begin_exit));
}
