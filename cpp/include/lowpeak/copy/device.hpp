#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "lowpeak/copy/stream_driver.hpp"
#include "lowpeak/host/fault_injector.hpp"

namespace lowpeak::copy {

/// @brief A copy, or the order of one, that the device refused; the text is the driver's.
class CopyError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// @brief The calls to a device that can fail.
enum class CopySite : std::size_t {
  create_stream,
  create_event,
  record,
  wait,
  query,
  synchronize,
  copy_out,
  copy_in,
  run_on_host
};

inline constexpr std::array<std::string_view, 9> copy_site_names{
    "create_stream", "create_event", "record",  "wait",       "query",
    "synchronize",   "copy_out",     "copy_in", "run_on_host"};

/// @throws std::invalid_argument for a name that is none of `copy_site_names`.
inline CopySite copy_site_named(std::string_view name) {
  for (std::size_t i = 0; i < copy_site_names.size(); ++i) {
    if (copy_site_names[i] == name) return static_cast<CopySite>(i);
  }
  throw std::invalid_argument("no call of a device has the name " + std::string(name));
}

/// @brief A driver whose failures are exceptions, and which is left alone once it is lost.
///
/// For any thread.
class Device {
 public:
  explicit Device(std::shared_ptr<StreamDriver> driver) : driver_(std::move(driver)) {}

  const char* name() const noexcept { return driver_->name(); }

  Stream create_stream() {
    Stream stream = 0;
    run(CopySite::create_stream, [&] { return driver_->create_stream(&stream); });
    return stream;
  }
  void destroy_stream(Stream stream) noexcept {
    if (!lost()) driver_->destroy_stream(stream);
  }
  void synchronize_stream(Stream stream) {
    run(CopySite::synchronize, [&] { return driver_->synchronize_stream(stream); });
  }

  Event create_event() {
    Event event = 0;
    run(CopySite::create_event, [&] { return driver_->create_event(&event); });
    return event;
  }
  void destroy_event(Event event) noexcept {
    if (!lost()) driver_->destroy_event(event);
  }
  void record(Event event, Stream stream) {
    run(CopySite::record, [&] { return driver_->record(event, stream); });
  }
  void wait(Stream stream, Event event) {
    run(CopySite::wait, [&] { return driver_->wait(stream, event); });
  }
  bool passed(Event event) {
    bool passed = false;
    run(CopySite::query, [&] { return driver_->query(event, &passed); });
    return passed;
  }
  void synchronize_event(Event event) {
    run(CopySite::synchronize, [&] { return driver_->synchronize_event(event); });
  }

  void copy_out(std::byte* host, std::uintptr_t device, std::size_t nbytes, Stream stream) {
    run(CopySite::copy_out, [&] { return driver_->copy_out(host, device, nbytes, stream); });
  }
  void copy_in(std::uintptr_t device, const std::byte* host, std::size_t nbytes, Stream stream) {
    run(CopySite::copy_in, [&] { return driver_->copy_in(device, host, nbytes, stream); });
  }

  bool runs_on_host() const noexcept { return driver_->runs_on_host(); }
  void run_on_host(const std::function<void()>& action, Stream stream) {
    run(CopySite::run_on_host, [&] { return driver_->run_on_host(action, stream); });
  }

  bool lost() const noexcept { return lost_.load(); }

  /// No call reaches the driver any more; each one throws.
  void lose(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lost()) return;
    reason_ = reason;
    lost_.store(true);
  }

  std::uint64_t failures() const noexcept { return failures_.load(); }

  /// The next `skip` calls of a site succeed, `times` calls after them fail, and with `loses` the
  /// device is lost by it.
  void fail(CopySite site, std::uint64_t skip, std::uint64_t times, bool loses) {
    const std::lock_guard<std::mutex> lock(mutex_);
    faults_.fail(site, skip, times);
    loses_ = loses;
  }

 private:
  template <typename Call>
  void run(CopySite site, Call call) {
    Outcome outcome = injected(site);
    if (outcome.ok) outcome = call();
    if (outcome.ok) return;
    failures_.fetch_add(1);
    if (outcome.device_lost) lose(outcome.error);
    throw CopyError(outcome.error);
  }

  Outcome injected(CopySite site) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lost()) return {false, "the device was lost before: " + reason_};
    if (!faults_.strikes(site)) return {};
    const std::string_view name = copy_site_names[static_cast<std::size_t>(site)];
    return {false, std::string(name) + " failed: injected", loses_};
  }

  std::shared_ptr<StreamDriver> driver_;
  std::atomic<bool> lost_{false};
  std::atomic<std::uint64_t> failures_{0};
  std::mutex mutex_;
  std::string reason_;
  host::FaultPlans<CopySite, copy_site_names.size()> faults_;
  bool loses_ = false;
};

}  // namespace lowpeak::copy
