#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "lowpeak/copy/cuda_streams.hpp"
#include "lowpeak/copy/hip_streams.hpp"
#include "lowpeak/copy/null_streams.hpp"
#include "lowpeak/copy/sim_streams.hpp"
#include "lowpeak/copy/stream_driver.hpp"

namespace lowpeak::copy {

/// @brief The streams of a backend: "cuda", "hip", "sim" or "null".
///
/// `mode` and `seed` are those of "sim"; see SimStreams.
/// @throws host::BackendError where the machine lacks what was named.
inline std::shared_ptr<StreamDriver> make_streams(const std::string& backend, int device,
                                                  const std::string& mode, std::uint64_t seed) {
  if (backend == "cuda") return std::make_shared<CudaStreams>(device);
  if (backend == "hip") return std::make_shared<HipStreams>(device);
  if (backend == "sim") return std::make_shared<SimStreams>(sim_mode_named(mode), seed);
  if (backend == "null") return std::make_shared<NullStreams>();
  throw std::invalid_argument("backend is none of cuda, hip, sim, null: " + backend);
}

}  // namespace lowpeak::copy
