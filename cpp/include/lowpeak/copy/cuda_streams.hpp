#pragma once

#include "lowpeak/copy/vendor_streams.hpp"
#include "lowpeak/host/cuda_context.hpp"

namespace lowpeak::copy {

/// @brief Streams and events of CUDA's driver API, by the symbols of CUDA 7.0; functions of the
/// host came with 10.0.
struct CudaStreamCalls {
  using Context = host::CudaContext;
  static constexpr const char* name = "cuda";
  static constexpr host::DynamicCall create_stream = "cuStreamCreate";
  static constexpr host::DynamicCall destroy_stream = {"cuStreamDestroy_v2", "cuStreamDestroy"};
  static constexpr host::DynamicCall synchronize_stream = "cuStreamSynchronize";
  static constexpr host::DynamicCall wait = "cuStreamWaitEvent";
  static constexpr host::DynamicCall create_event = "cuEventCreate";
  static constexpr host::DynamicCall destroy_event = {"cuEventDestroy_v2", "cuEventDestroy"};
  static constexpr host::DynamicCall record = "cuEventRecord";
  static constexpr host::DynamicCall query = "cuEventQuery";
  static constexpr host::DynamicCall synchronize_event = "cuEventSynchronize";
  static constexpr host::DynamicCall copy_out = {"cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync"};
  static constexpr host::DynamicCall copy_in = {"cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync"};
  static constexpr host::DynamicCall run_on_host = "cuLaunchHostFunc";
};

using CudaStreams = VendorStreams<CudaStreamCalls>;

}  // namespace lowpeak::copy
