#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "lowpeak/host/cuda_driver.hpp"
#include "lowpeak/host/hip_driver.hpp"
#include "lowpeak/host/null_driver.hpp"
#include "lowpeak/host/sim_driver.hpp"

namespace lowpeak::host {

namespace detail {

/// One driver a device and process, never destroyed: pools may outlive static destructors.
inline std::shared_ptr<Driver> shared_driver(const std::string& backend, int device) {
  static auto* mutex = new std::mutex;
  static auto* drivers = new std::map<std::pair<std::string, int>, std::shared_ptr<Driver>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  std::shared_ptr<Driver>& driver = (*drivers)[{backend, device}];
  if (driver == nullptr && backend == "cuda") driver = std::make_shared<CudaDriver>(device);
  if (driver == nullptr && backend == "hip") driver = std::make_shared<HipDriver>(device);
  return driver;
}

}  // namespace detail

/// @brief The driver of a backend: "cuda", "hip", "sim", "null", or what "auto" finds here.
///
/// "auto" takes CUDA or HIP, whichever starts, and "null" where neither does.
/// @param why_null  Where "auto" took "null": what the others said.
/// @throws BackendError where the machine lacks what was named.
inline std::shared_ptr<Driver> make_driver(const std::string& backend, int device,
                                           std::string* why_null) {
  if (backend == "null") return std::make_shared<NullDriver>();
  if (backend == "sim") return std::make_shared<SimDriver>();
  if (backend == "cuda" || backend == "hip") return detail::shared_driver(backend, device);
  if (backend != "auto") {
    throw std::invalid_argument("backend is none of auto, cuda, hip, sim, null: " + backend);
  }
  for (const char* candidate : {"cuda", "hip"}) {
    try {
      return detail::shared_driver(candidate, device);
    } catch (const BackendError& error) {
      *why_null += (why_null->empty() ? "" : "; ") + std::string(error.what());
    }
  }
  return std::make_shared<NullDriver>();
}

}  // namespace lowpeak::host
