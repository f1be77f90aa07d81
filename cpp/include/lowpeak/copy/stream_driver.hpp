#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "lowpeak/host/driver.hpp"

namespace lowpeak::copy {

using host::Outcome;

/// The driver's handle of a stream, as an integer; torch's streams have theirs.
using Stream = std::uintptr_t;

/// The driver's handle of an event.
using Event = std::uintptr_t;

/// @brief What copies need of one device: streams, events, asynchronous copies.
///
/// As in CUDA, a wait is for what was recorded last when it was queued, whatever is recorded later,
/// and an event that was never recorded has passed. Called from any thread.
class StreamDriver {
 public:
  virtual ~StreamDriver() = default;

  virtual const char* name() const noexcept = 0;

  /// A stream that does not wait for the default stream.
  virtual Outcome create_stream(Stream* stream) = 0;
  virtual Outcome destroy_stream(Stream stream) = 0;
  /// Blocks the host until the stream is empty.
  virtual Outcome synchronize_stream(Stream stream) = 0;

  virtual Outcome create_event(Event* event) = 0;
  virtual Outcome destroy_event(Event event) = 0;
  virtual Outcome record(Event event, Stream stream) = 0;
  virtual Outcome wait(Stream stream, Event event) = 0;
  virtual Outcome query(Event event, bool* passed) = 0;
  /// Blocks the host until the event has passed.
  virtual Outcome synchronize_event(Event event) = 0;

  virtual Outcome copy_out(std::byte* host, std::uintptr_t device, std::size_t nbytes,
                           Stream stream) = 0;
  virtual Outcome copy_in(std::uintptr_t device, const std::byte* host, std::size_t nbytes,
                          Stream stream) = 0;

  /// Whether run_on_host() is to be had.
  virtual bool runs_on_host() const noexcept { return true; }

  /// Runs an action on a thread of the host when the stream comes to it; the stream goes on after
  /// it. It calls no driver.
  virtual Outcome run_on_host(std::function<void()> action, Stream stream) = 0;
};

}  // namespace lowpeak::copy
