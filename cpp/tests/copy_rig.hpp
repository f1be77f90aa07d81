#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "check.hpp"
#include "lowpeak/copy/copy_engine.hpp"
#include "lowpeak/host/sim_driver.hpp"

/// A device's memory, its computation, and an engine over both; `Streams` is a simulated driver.
template <typename Streams>
class Rig {
 public:
  using Stream = lowpeak::copy::Stream;
  static constexpr std::size_t KiB = std::size_t{1} << 10;
  static constexpr std::size_t MiB = std::size_t{1} << 20;

  /// Bytes on the device. They live as long as the rig: to give them back is a kernel that poisons.
  struct Memory {
    explicit Memory(std::size_t nbytes) : bytes(nbytes, 0xEE) {}
    std::vector<unsigned char> bytes;
    std::uintptr_t address() { return reinterpret_cast<std::uintptr_t>(bytes.data()); }
  };
  using Shared = std::shared_ptr<Memory>;

  // Declared before the streams, so that it goes after them.
 private:
  std::mutex mutex_;
  std::vector<Shared> all_;

 public:
  using Pool = std::shared_ptr<lowpeak::host::HostPool>;

  template <typename... Arguments>
  explicit Rig(std::size_t limit, Arguments... arguments) : Rig(make_pool(limit), arguments...) {}

  template <typename... Arguments>
  explicit Rig(Pool host, Arguments... arguments)
      : streams(std::make_shared<Streams>(arguments...)), pool(std::move(host)) {
    engine = std::make_unique<lowpeak::copy::CopyEngine>(pool, streams);
    CHECK(streams->create_stream(&compute).ok);
    CHECK(streams->create_stream(&other).ok);
  }

  /// Another engine, whose copies are a part of the stream that is current.
  void within() {
    engine.reset();
    engine = std::make_unique<lowpeak::copy::CopyEngine>(pool, streams, false);
  }

  static Pool make_pool(std::size_t limit) {
    lowpeak::host::HostPoolOptions options;
    options.pool = {2 * MiB, 2 * MiB, 0};
    options.budget.limit = limit;
    return std::make_shared<lowpeak::host::HostPool>(std::make_shared<lowpeak::host::SimDriver>(),
                                                     options);
  }

  Shared memory(std::size_t nbytes) {
    auto memory = std::make_shared<Memory>(nbytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    all_.push_back(memory);
    return memory;
  }

  /// Computes a value: all bytes of the memory become it.
  void fill(Stream stream, const Shared& memory, unsigned char value) {
    const auto action = [memory, value] {
      std::memset(memory->bytes.data(), value, memory->bytes.size());
    };
    CHECK(streams->launch(stream, action).ok);
  }

  /// Uses a value: all bytes must be it.
  void use(Stream stream, const Shared& memory, unsigned char value) {
    CHECK(streams->launch(stream, [memory, value] { CHECK(holds(memory, value)); }).ok);
  }

  /// Gives memory back; whatever the stream does later may have it.
  void free(Stream stream, const Shared& memory) { fill(stream, memory, 0xCB); }

  static bool holds(const Shared& memory, unsigned char value) {
    const unsigned char* data = memory->bytes.data();
    return data[0] == value && std::memcmp(data, data + 1, memory->bytes.size() - 1) == 0;
  }

  void compute_all() {
    CHECK(streams->synchronize_stream(compute).ok);
    CHECK(streams->synchronize_stream(other).ok);
  }

  lowpeak::copy::Ticket out(lowpeak::copy::Rooms::Id room, const Shared& source) {
    return engine->copy_out(room, source->address(), source->bytes.size(), compute);
  }

  lowpeak::copy::Ticket in(lowpeak::copy::Rooms::Id room, const Shared& target,
                           const lowpeak::copy::Ticket& after) {
    return engine->copy_in(room, target->address(), target->bytes.size(), compute, after);
  }

  lowpeak::copy::Ticket in_on(Stream current, lowpeak::copy::Rooms::Id room, const Shared& target,
                              const lowpeak::copy::Ticket& after) {
    return engine->copy_in(room, target->address(), target->bytes.size(), current, after);
  }

  std::shared_ptr<Streams> streams;
  Pool pool;
  std::unique_ptr<lowpeak::copy::CopyEngine> engine;
  Stream compute = 0;
  Stream other = 0;
};
