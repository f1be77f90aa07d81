#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lowpeak/copy/host_streams.hpp"

namespace lowpeak::copy {

/// When a simulated device does what it may do.
enum class SimMode {
  laziest,  ///< Not before something waits for it.
  eager,    ///< At once.
  random    ///< At any call, by a seeded throw.
};

/// @throws std::invalid_argument for another name.
inline SimMode sim_mode_named(const std::string& name) {
  if (name == "laziest") return SimMode::laziest;
  if (name == "eager") return SimMode::eager;
  if (name == "random") return SimMode::random;
  throw std::invalid_argument("mode is none of laziest, eager, random: " + name);
}

/// Which of `count` streams does its next thing, or `count`: none of them for now.
using Choice = std::function<std::size_t(std::size_t count)>;

/// What a mode chooses; the seed is for what it does not say.
inline Choice choice_of(SimMode mode, std::uint64_t seed) {
  return [mode, random = std::mt19937_64(seed)](std::size_t count) mutable -> std::size_t {
    if (mode == SimMode::laziest) return count;
    if (mode == SimMode::random && random() % 5 >= 2) return count;
    return random() % count;
  };
}

/// @brief Streams without a device, run in one thread, by a schedule that means ill.
///
/// Whenever something happened that a device could have used to go on, the choice is asked whether
/// it did. Stream 0 is the host itself: what it did is done, and when it waits, things run until it
/// need not. So a program that computes on the host can be the device's computation.
class SimStreams final : public HostStreams {
 public:
  explicit SimStreams(Choice choose) : choose_(std::move(choose)) {}
  SimStreams(SimMode mode, std::uint64_t seed) : SimStreams(choice_of(mode, seed)) {}

  const char* name() const noexcept override { return "sim"; }

  Outcome create_stream(Stream* stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    *stream = ++handles_;
    queues_[*stream];
    return {};
  }

  Outcome destroy_stream(Stream stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = queues_.find(stream);
    if (place == queues_.end() || !place->second.empty()) return {false, "sim: stream in use"};
    queues_.erase(place);
    return {};
  }

  Outcome synchronize_stream(Stream stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = queues_.find(stream);
    if (place == queues_.end()) return {false, "sim: no such stream"};
    while (!place->second.empty()) run_head(stream);
    return {};
  }

  Outcome create_event(Event* event) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    *event = ++handles_;
    events_[*event] = nullptr;
    return {};
  }

  Outcome destroy_event(Event event) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return events_.erase(event) == 1 ? Outcome{} : Outcome{false, "sim: no such event"};
  }

  Outcome record(Event event, Stream stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = events_.find(event);
    if (place == events_.end()) return {false, "sim: no such event"};
    place->second = std::make_shared<Point>(Point{stream, stream == 0});
    return stream == 0 ? Outcome{} : queue(stream, {{}, nullptr, place->second});
  }

  Outcome wait(Stream stream, Event event) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = events_.find(event);
    if (place == events_.end()) return {false, "sim: no such event"};
    if (stream != 0) return queue(stream, {{}, place->second, nullptr});
    run_to(place->second);
    return {};
  }

  Outcome query(Event event, bool* passed) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto place = events_.find(event);
    if (place == events_.end()) return {false, "sim: no such event"};
    tick();
    *passed = place->second == nullptr || place->second->passed;
    return {};
  }

  Outcome synchronize_event(Event event) override { return wait(0, event); }

  Outcome launch(Stream stream, std::function<void()> action) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stream == 0) {
      action();
      tick();
      return {};
    }
    return queue(stream, {std::move(action), nullptr, nullptr});
  }

 private:
  /// A place in a stream, which an event marks.
  struct Point {
    Stream stream;
    bool passed;
  };
  struct Operation {
    std::function<void()> action;
    std::shared_ptr<Point> needs;
    std::shared_ptr<Point> reaches;

    bool may_run() const { return needs == nullptr || needs->passed; }
  };

  Outcome queue(Stream stream, Operation operation) {
    const auto place = queues_.find(stream);
    if (place == queues_.end()) return {false, "sim: no such stream"};
    place->second.push_back(std::move(operation));
    tick();
    return {};
  }

  std::vector<Stream> runnable() const {
    std::vector<Stream> streams;
    for (const auto& [stream, queue] : queues_) {
      if (!queue.empty() && queue.front().may_run()) streams.push_back(stream);
    }
    return streams;
  }

  void tick() {
    for (auto streams = runnable(); !streams.empty(); streams = runnable()) {
      const std::size_t chosen = choose_(streams.size());
      if (chosen >= streams.size()) return;
      run_head(streams[chosen]);
    }
  }

  void run_to(const std::shared_ptr<Point>& point) {
    while (point != nullptr && !point->passed) run_head(point->stream);
  }

  void run_head(Stream stream) {
    std::deque<Operation>& operations = queues_.at(stream);
    // Queued before this wait was, so no chain of these comes back to here.
    run_to(operations.front().needs);
    const Operation operation = std::move(operations.front());
    operations.pop_front();
    if (operation.action) operation.action();
    if (operation.reaches) operation.reaches->passed = true;
  }

  Choice choose_;
  std::mutex mutex_;
  std::uintptr_t handles_ = 0;
  std::map<Stream, std::deque<Operation>> queues_;
  std::map<Event, std::shared_ptr<Point>> events_;
};

}  // namespace lowpeak::copy
