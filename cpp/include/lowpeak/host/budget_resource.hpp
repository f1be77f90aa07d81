#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "lowpeak/host/budget.hpp"
#include "lowpeak/host/error.hpp"
#include "lowpeak/host/segment_resource.hpp"

namespace lowpeak::host {

/// @brief Takes each segment from a budget first, before a page is touched.
class BudgetResource final : public SegmentResource {
 public:
  BudgetResource(SegmentResource& upstream, std::shared_ptr<Budget> budget)
      : upstream_(upstream), budget_(std::move(budget)) {}

  Segment allocate(std::size_t nbytes) override {
    budget_->take(nbytes);
    try {
      return upstream_.allocate(nbytes);
    } catch (const HostMemoryError& error) {
      budget_->give(nbytes);
      throw HostMemoryError(std::string(error.what()) + "; " + budget_->description());
    } catch (...) {
      budget_->give(nbytes);
      throw;
    }
  }

  bool deallocate(const Segment& segment) noexcept override {
    // A segment that the driver did not take back is still there, and counts.
    if (!upstream_.deallocate(segment)) return false;
    budget_->give(segment.nbytes);
    return true;
  }

  std::size_t room() override { return std::min(budget_->room(), upstream_.room()); }

 private:
  SegmentResource& upstream_;
  std::shared_ptr<Budget> budget_;
};

}  // namespace lowpeak::host
