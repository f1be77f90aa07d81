#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "lowpeak/host/host_pool.hpp"

namespace lowpeak::host {

/// @brief One contiguous allocation, given back at the end of its life.
class Block {
 public:
  /// @throws what HostPool::allocate_block() throws
  Block(std::shared_ptr<HostPool> pool, std::size_t nbytes)
      : pool_(std::move(pool)),
        id_(pool_->allocate_block(nbytes)),
        run_(pool_->runs(id_).front()) {}

  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { pool_->release(id_); }

  /// @throws ForkedError in a forked child.
  std::byte* data() const {
    pool_->check_process();
    return run_.data;
  }

  std::size_t nbytes() const noexcept { return run_.nbytes; }
  const HostPool& pool() const noexcept { return *pool_; }

 private:
  std::shared_ptr<HostPool> pool_;
  HostPool::Id id_;
  Run run_;
};

}  // namespace lowpeak::host
