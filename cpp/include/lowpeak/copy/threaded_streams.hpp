#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "lowpeak/copy/host_streams.hpp"

namespace lowpeak::copy {

/// @brief Streams without a device, a thread each, with random pauses: for thread sanitizers.
///
/// Stream 0 is the calling thread.
class ThreadedStreams final : public HostStreams {
 public:
  explicit ThreadedStreams(std::uint64_t seed) : seed_(seed) {}

  ThreadedStreams(const ThreadedStreams&) = delete;
  ThreadedStreams& operator=(const ThreadedStreams&) = delete;
  ~ThreadedStreams() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [handle, queue] : queues_) queue->stopped = true;
    }
    changed_.notify_all();
    for (auto& [handle, queue] : queues_) queue->worker.join();
  }

  const char* name() const noexcept override { return "sim"; }

  Outcome create_stream(Stream* stream) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    *stream = ++handles_;
    auto queue = std::make_unique<Queue>();
    Queue& own = *queue;
    queue->worker = std::thread([this, &own, seed = seed_ + *stream] { work(own, seed); });
    queues_.emplace(*stream, std::move(queue));
    return {};
  }

  Outcome destroy_stream(Stream stream) override {
    std::unique_ptr<Queue> queue;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto place = queues_.find(stream);
      if (place == queues_.end()) return {false, "sim: no such stream"};
      queue = std::move(place->second);
      queues_.erase(place);
      queue->stopped = true;
    }
    changed_.notify_all();
    queue->worker.join();
    return {};
  }

  Outcome synchronize_stream(Stream stream) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto point = std::make_shared<Point>();
    Outcome outcome = push(stream, {{}, nullptr, point});
    if (outcome.ok) changed_.wait(lock, [&] { return point->passed; });
    return outcome;
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
    const auto point = std::make_shared<Point>(Point{stream == 0});
    events_.at(event) = point;
    return stream == 0 ? Outcome{} : push(stream, {{}, nullptr, point});
  }

  Outcome wait(Stream stream, Event event) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::shared_ptr<Point> point = events_.at(event);
    if (stream != 0) return push(stream, {{}, point, nullptr});
    changed_.wait(lock, [&] { return point == nullptr || point->passed; });
    return {};
  }

  Outcome query(Event event, bool* passed) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::shared_ptr<Point>& point = events_.at(event);
    *passed = point == nullptr || point->passed;
    return {};
  }

  Outcome synchronize_event(Event event) override { return wait(0, event); }

  Outcome launch(Stream stream, std::function<void()> action) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stream == 0) {
      action();
      return {};
    }
    return push(stream, {std::move(action), nullptr, nullptr});
  }

 private:
  struct Point {
    bool passed = false;
  };
  struct Operation {
    std::function<void()> action;
    std::shared_ptr<Point> needs;
    std::shared_ptr<Point> reaches;
  };
  struct Queue {
    std::deque<Operation> operations;
    bool stopped = false;
    std::thread worker;
  };

  Outcome push(Stream stream, Operation operation) {
    const auto place = queues_.find(stream);
    if (place == queues_.end()) return {false, "sim: no such stream"};
    place->second->operations.push_back(std::move(operation));
    changed_.notify_all();
    return {};
  }

  void work(Queue& queue, std::uint64_t seed) {
    std::minstd_rand random(static_cast<unsigned>(seed));
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] {
        if (queue.operations.empty()) return queue.stopped;
        const std::shared_ptr<Point>& needs = queue.operations.front().needs;
        return needs == nullptr || needs->passed;
      });
      if (queue.operations.empty()) return;
      Operation operation = std::move(queue.operations.front());
      queue.operations.pop_front();
      lock.unlock();
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 50));
      if (operation.action) operation.action();
      lock.lock();
      if (operation.reaches) operation.reaches->passed = true;
      changed_.notify_all();
    }
  }

  const std::uint64_t seed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uintptr_t handles_ = 0;
  std::map<Stream, std::unique_ptr<Queue>> queues_;
  std::map<Event, std::shared_ptr<Point>> events_;
};

}  // namespace lowpeak::copy
