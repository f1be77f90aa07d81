#pragma once

#include "lowpeak/copy/stream_driver.hpp"
#include "lowpeak/host/cuda_context.hpp"

namespace lowpeak::copy {

/// @brief Streams and events of CUDA's driver API, by the symbols of CUDA 7.0.
class CudaStreams final : public StreamDriver {
 public:
  /// @throws host::BackendError where there is no driver, no such device, or it does not start.
  explicit CudaStreams(int device) : context_(device) {
    context_.load("cuStreamCreate", create_stream_);
    context_.load("cuStreamDestroy_v2", destroy_stream_);
    context_.load("cuStreamSynchronize", synchronize_stream_);
    context_.load("cuStreamWaitEvent", wait_);
    context_.load("cuEventCreate", create_event_);
    context_.load("cuEventDestroy_v2", destroy_event_);
    context_.load("cuEventRecord", record_);
    context_.load("cuEventQuery", query_);
    context_.load("cuEventSynchronize", synchronize_event_);
    context_.load("cuMemcpyDtoHAsync_v2", copy_out_);
    context_.load("cuMemcpyHtoDAsync_v2", copy_in_);
  }

  const char* name() const noexcept override { return "cuda"; }

  Outcome create_stream(Stream* stream) override {
    return context_.run("cuStreamCreate", [&] { return create_stream_(stream, non_blocking); });
  }
  Outcome destroy_stream(Stream stream) override {
    return context_.run("cuStreamDestroy", [&] { return destroy_stream_(stream); });
  }
  Outcome synchronize_stream(Stream stream) override {
    return context_.run("cuStreamSynchronize", [&] { return synchronize_stream_(stream); });
  }

  Outcome create_event(Event* event) override {
    return context_.run("cuEventCreate", [&] { return create_event_(event, disable_timing); });
  }
  Outcome destroy_event(Event event) override {
    return context_.run("cuEventDestroy", [&] { return destroy_event_(event); });
  }
  Outcome record(Event event, Stream stream) override {
    return context_.run("cuEventRecord", [&] { return record_(event, stream); });
  }
  Outcome wait(Stream stream, Event event) override {
    return context_.run("cuStreamWaitEvent", [&] { return wait_(stream, event, 0); });
  }
  Outcome query(Event event, bool* passed) override {
    return context_.run("cuEventQuery", [&] {
      const int code = query_(event);
      *passed = code == 0;
      return code == not_ready ? 0 : code;
    });
  }
  Outcome synchronize_event(Event event) override {
    return context_.run("cuEventSynchronize", [&] { return synchronize_event_(event); });
  }

  Outcome copy_out(std::byte* host, std::uintptr_t device, std::size_t nbytes,
                   Stream stream) override {
    return context_.run("cuMemcpyDtoHAsync",
                        [&] { return copy_out_(host, device, nbytes, stream); });
  }
  Outcome copy_in(std::uintptr_t device, const std::byte* host, std::size_t nbytes,
                  Stream stream) override {
    return context_.run("cuMemcpyHtoDAsync",
                        [&] { return copy_in_(device, host, nbytes, stream); });
  }

 private:
  static constexpr unsigned non_blocking = 1;    // CU_STREAM_NON_BLOCKING
  static constexpr unsigned disable_timing = 2;  // CU_EVENT_DISABLE_TIMING
  static constexpr int not_ready = 600;          // CUDA_ERROR_NOT_READY

  host::CudaContext context_;
  int (*create_stream_)(Stream*, unsigned) = nullptr;
  int (*destroy_stream_)(Stream) = nullptr;
  int (*synchronize_stream_)(Stream) = nullptr;
  int (*wait_)(Stream, Event, unsigned) = nullptr;
  int (*create_event_)(Event*, unsigned) = nullptr;
  int (*destroy_event_)(Event) = nullptr;
  int (*record_)(Event, Stream) = nullptr;
  int (*query_)(Event) = nullptr;
  int (*synchronize_event_)(Event) = nullptr;
  int (*copy_out_)(void*, std::uintptr_t, std::size_t, Stream) = nullptr;
  int (*copy_in_)(std::uintptr_t, const void*, std::size_t, Stream) = nullptr;
};

}  // namespace lowpeak::copy
