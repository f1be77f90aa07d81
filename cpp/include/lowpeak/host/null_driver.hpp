#pragma once

#include "lowpeak/host/driver.hpp"

namespace lowpeak::host {

/// @brief No device: memory is plain memory, and nothing is pinned.
class NullDriver final : public Driver {
 public:
  explicit NullDriver(bool poisons = false) : poisons_(poisons) {}

  const char* name() const noexcept override { return "null"; }
  bool pins() const noexcept override { return false; }
  bool poisons() const noexcept override { return poisons_; }
  Outcome register_host(void*, std::size_t) override { return {}; }
  Outcome unregister_host(void*) override { return {}; }
  Outcome allocate_host(std::size_t, void**) override {
    return {false, "the null backend has no memory of its own"};
  }
  Outcome free_host(void*) override { return {}; }

 private:
  bool poisons_;
};

}  // namespace lowpeak::host
