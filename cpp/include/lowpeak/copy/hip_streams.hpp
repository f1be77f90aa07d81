#pragma once

#include "lowpeak/copy/vendor_streams.hpp"
#include "lowpeak/host/hip_context.hpp"

namespace lowpeak::copy {

/// @brief Streams and events of AMD's HIP runtime.
struct HipStreamCalls {
  using Context = host::HipContext;
  static constexpr const char* name = "hip";
  static constexpr host::DynamicCall create_stream = "hipStreamCreateWithFlags";
  static constexpr host::DynamicCall destroy_stream = "hipStreamDestroy";
  static constexpr host::DynamicCall synchronize_stream = "hipStreamSynchronize";
  static constexpr host::DynamicCall wait = "hipStreamWaitEvent";
  static constexpr host::DynamicCall create_event = "hipEventCreateWithFlags";
  static constexpr host::DynamicCall destroy_event = "hipEventDestroy";
  static constexpr host::DynamicCall record = "hipEventRecord";
  static constexpr host::DynamicCall query = "hipEventQuery";
  static constexpr host::DynamicCall synchronize_event = "hipEventSynchronize";
  static constexpr host::DynamicCall copy_out = "hipMemcpyDtoHAsync";
  static constexpr host::DynamicCall copy_in = "hipMemcpyHtoDAsync";
  static constexpr host::DynamicCall run_on_host = "hipLaunchHostFunc";
};

using HipStreams = VendorStreams<HipStreamCalls>;

}  // namespace lowpeak::copy
