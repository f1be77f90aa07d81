#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>

#include "lowpeak/copy/stream_driver.hpp"

namespace lowpeak::copy {

/// @brief Streams whose work runs on the host: copies are memcpy, and wait as all else does.
class HostStreams : public StreamDriver {
 public:
  /// Queues what a kernel would do.
  virtual Outcome launch(Stream stream, std::function<void()> action) = 0;

  Outcome copy_out(std::byte* host, std::uintptr_t device, std::size_t nbytes,
                   Stream stream) final {
    return launch(stream,
                  [=] { std::memcpy(host, reinterpret_cast<const void*>(device), nbytes); });
  }

  Outcome copy_in(std::uintptr_t device, const std::byte* host, std::size_t nbytes,
                  Stream stream) final {
    return launch(stream, [=] { std::memcpy(reinterpret_cast<void*>(device), host, nbytes); });
  }

  Outcome run_on_host(std::function<void()> action, Stream stream) final {
    return launch(stream, std::move(action));
  }
};

}  // namespace lowpeak::copy
