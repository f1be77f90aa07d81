#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "lowpeak/copy/stream_driver.hpp"
#include "lowpeak/host/dynamic_call.hpp"

namespace lowpeak::copy {

/// @brief Streams and events of the driver of a vendor whose calls `Vendor` names.
///
/// CUDA and HIP agree on what these functions take, return and mean.
template <typename Vendor>
class VendorStreams final : public StreamDriver {
 public:
  /// @throws host::BackendError where there is no driver, no such device, or it does not start.
  explicit VendorStreams(int device) : context_(device) {
    context_.load(Vendor::create_stream.symbol, create_stream_);
    context_.load(Vendor::destroy_stream.symbol, destroy_stream_);
    context_.load(Vendor::synchronize_stream.symbol, synchronize_stream_);
    context_.load(Vendor::wait.symbol, wait_);
    context_.load(Vendor::create_event.symbol, create_event_);
    context_.load(Vendor::destroy_event.symbol, destroy_event_);
    context_.load(Vendor::record.symbol, record_);
    context_.load(Vendor::query.symbol, query_);
    context_.load(Vendor::synchronize_event.symbol, synchronize_event_);
    context_.load(Vendor::copy_out.symbol, copy_out_);
    context_.load(Vendor::copy_in.symbol, copy_in_);
    context_.load_if_there(Vendor::run_on_host.symbol, run_on_host_);
  }

  const char* name() const noexcept override { return Vendor::name; }

  Outcome create_stream(Stream* stream) override {
    return context_.run(Vendor::create_stream.name,
                        [&] { return create_stream_(stream, non_blocking); });
  }
  Outcome destroy_stream(Stream stream) override {
    return context_.run(Vendor::destroy_stream.name, [&] { return destroy_stream_(stream); });
  }
  Outcome synchronize_stream(Stream stream) override {
    return context_.run(Vendor::synchronize_stream.name,
                        [&] { return synchronize_stream_(stream); });
  }

  Outcome create_event(Event* event) override {
    return context_.run(Vendor::create_event.name,
                        [&] { return create_event_(event, disable_timing); });
  }
  Outcome destroy_event(Event event) override {
    return context_.run(Vendor::destroy_event.name, [&] { return destroy_event_(event); });
  }
  Outcome record(Event event, Stream stream) override {
    return context_.run(Vendor::record.name, [&] { return record_(event, stream); });
  }
  Outcome wait(Stream stream, Event event) override {
    return context_.run(Vendor::wait.name, [&] { return wait_(stream, event, 0); });
  }
  Outcome query(Event event, bool* passed) override {
    return context_.run(Vendor::query.name, [&] {
      const int code = query_(event);
      *passed = code == 0;
      return code == not_ready ? 0 : code;
    });
  }
  Outcome synchronize_event(Event event) override {
    return context_.run(Vendor::synchronize_event.name, [&] { return synchronize_event_(event); });
  }

  Outcome copy_out(std::byte* host, std::uintptr_t device, std::size_t nbytes,
                   Stream stream) override {
    return context_.run(Vendor::copy_out.name,
                        [&] { return copy_out_(host, device, nbytes, stream); });
  }
  Outcome copy_in(std::uintptr_t device, const std::byte* host, std::size_t nbytes,
                  Stream stream) override {
    return context_.run(Vendor::copy_in.name,
                        [&] { return copy_in_(device, host, nbytes, stream); });
  }

  bool runs_on_host() const noexcept override { return run_on_host_ != nullptr; }

  /// Only where runs_on_host().
  Outcome run_on_host(std::function<void()> action, Stream stream) override {
    auto owned = std::make_unique<std::function<void()>>(std::move(action));
    const Outcome outcome = context_.run(Vendor::run_on_host.name, [&] {
      return run_on_host_(stream, &VendorStreams::run_once, owned.get());
    });
    if (outcome.ok) static_cast<void>(owned.release());
    return outcome;
  }

 private:
  /// On a thread of the driver.
  static void run_once(void* action) {
    const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(action));
    (*owned)();
  }

  static constexpr unsigned non_blocking = 1;    // CU_STREAM_NON_BLOCKING, hipStreamNonBlocking
  static constexpr unsigned disable_timing = 2;  // CU_EVENT_DISABLE_TIMING, hipEventDisableTiming
  static constexpr int not_ready = 600;          // CUDA_ERROR_NOT_READY, hipErrorNotReady

  typename Vendor::Context context_;
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
  int (*run_on_host_)(Stream, void (*)(void*), void*) = nullptr;
};

}  // namespace lowpeak::copy
