#pragma once

#include "lowpeak/copy/stream_driver.hpp"
#include "lowpeak/host/hip_context.hpp"

namespace lowpeak::copy {

/// @brief Streams and events of AMD's HIP runtime.
class HipStreams final : public StreamDriver {
 public:
  /// @throws host::BackendError where there is no runtime, no such device, or it does not start.
  explicit HipStreams(int device) : context_(device) {
    context_.load("hipStreamCreateWithFlags", create_stream_);
    context_.load("hipStreamDestroy", destroy_stream_);
    context_.load("hipStreamSynchronize", synchronize_stream_);
    context_.load("hipStreamWaitEvent", wait_);
    context_.load("hipEventCreateWithFlags", create_event_);
    context_.load("hipEventDestroy", destroy_event_);
    context_.load("hipEventRecord", record_);
    context_.load("hipEventQuery", query_);
    context_.load("hipEventSynchronize", synchronize_event_);
    context_.load("hipMemcpyDtoHAsync", copy_out_);
    context_.load("hipMemcpyHtoDAsync", copy_in_);
  }

  const char* name() const noexcept override { return "hip"; }

  Outcome create_stream(Stream* stream) override {
    return context_.run("hipStreamCreateWithFlags",
                        [&] { return create_stream_(stream, non_blocking); });
  }
  Outcome destroy_stream(Stream stream) override {
    return context_.run("hipStreamDestroy", [&] { return destroy_stream_(stream); });
  }
  Outcome synchronize_stream(Stream stream) override {
    return context_.run("hipStreamSynchronize", [&] { return synchronize_stream_(stream); });
  }

  Outcome create_event(Event* event) override {
    return context_.run("hipEventCreateWithFlags",
                        [&] { return create_event_(event, disable_timing); });
  }
  Outcome destroy_event(Event event) override {
    return context_.run("hipEventDestroy", [&] { return destroy_event_(event); });
  }
  Outcome record(Event event, Stream stream) override {
    return context_.run("hipEventRecord", [&] { return record_(event, stream); });
  }
  Outcome wait(Stream stream, Event event) override {
    return context_.run("hipStreamWaitEvent", [&] { return wait_(stream, event, 0); });
  }
  Outcome query(Event event, bool* passed) override {
    return context_.run("hipEventQuery", [&] {
      const int code = query_(event);
      *passed = code == 0;
      return code == not_ready ? 0 : code;
    });
  }
  Outcome synchronize_event(Event event) override {
    return context_.run("hipEventSynchronize", [&] { return synchronize_event_(event); });
  }

  Outcome copy_out(std::byte* host, std::uintptr_t device, std::size_t nbytes,
                   Stream stream) override {
    return context_.run("hipMemcpyDtoHAsync",
                        [&] { return copy_out_(host, device, nbytes, stream); });
  }
  Outcome copy_in(std::uintptr_t device, const std::byte* host, std::size_t nbytes,
                  Stream stream) override {
    return context_.run("hipMemcpyHtoDAsync",
                        [&] { return copy_in_(device, host, nbytes, stream); });
  }

 private:
  static constexpr unsigned non_blocking = 1;    // hipStreamNonBlocking
  static constexpr unsigned disable_timing = 2;  // hipEventDisableTiming
  static constexpr int not_ready = 600;          // hipErrorNotReady

  host::HipContext context_;
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
