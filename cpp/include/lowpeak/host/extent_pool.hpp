#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lowpeak/host/error.hpp"
#include "lowpeak/host/granule_map.hpp"
#include "lowpeak/host/mapping.hpp"
#include "lowpeak/host/segment_resource.hpp"

namespace lowpeak::host {

/// @brief Sizes that a pool works with, in bytes.
struct PoolOptions {
  std::size_t segment_bytes = std::size_t{256} << 20;  ///< What the pool grows by.
  std::size_t extent_bytes = std::size_t{8} << 20;     ///< What records are made of.
  std::size_t low_water_bytes = 0;                     ///< What trim() keeps.
};

/// @brief What a pool holds, in bytes where a name does not say otherwise.
struct PoolStatistics {
  std::size_t reserved = 0;  ///< In segments.
  std::size_t used = 0;      ///< In granules that are taken.
  std::size_t live = 0;      ///< Asked for by those who hold them.
  std::size_t peak_reserved = 0;
  std::size_t peak_live = 0;
  std::size_t segments = 0;     ///< A number.
  std::size_t allocations = 0;  ///< A number: those that are live.
  std::uint64_t growths = 0;    ///< A number, as are those below.
  std::uint64_t trimmed_segments = 0;
  std::uint64_t idle_segments = 0;  ///< Those of them that went because no step used them.
  std::uint64_t refusals = 0;
};

/// @brief Adjacent bytes; a record is a list of them.
struct Run {
  std::byte* data;
  std::size_t nbytes;
};

/// @brief Records and blocks in segments of an upstream resource.
///
/// A block is contiguous; a record, which only a copy engine reads, is a list of runs and so never
/// suffers from fragmentation. Both take the lowest address that fits, which leaves whole segments
/// free at the top. What is less than an extent, and the rest of a record over whole extents, goes
/// by granules of 64 KiB into extents that are in use already.
///
/// Not synchronised.
class ExtentPool {
 public:
  using Id = std::uint64_t;
  static constexpr std::size_t granule = std::size_t{64} << 10;

  /// @throws std::invalid_argument for sizes that do not divide each other.
  ExtentPool(SegmentResource& upstream, PoolOptions options)
      : upstream_(upstream), options_(options) {
    if (options_.extent_bytes == 0 || options_.extent_bytes % Mapping::alignment != 0) {
      throw std::invalid_argument("extent_bytes must be a multiple of 2 MiB, not " +
                                  std::to_string(options_.extent_bytes));
    }
    if (options_.segment_bytes == 0 || options_.segment_bytes % options_.extent_bytes != 0) {
      throw std::invalid_argument("segment_bytes must be a multiple of extent_bytes, not " +
                                  std::to_string(options_.segment_bytes));
    }
  }

  ExtentPool(const ExtentPool&) = delete;
  ExtentPool& operator=(const ExtentPool&) = delete;
  /// Gives every segment back; nobody may hold an allocation any more.
  ~ExtentPool() {
    for (const std::unique_ptr<Room>& room : rooms_) upstream_.deallocate(room->segment);
  }

  /// @brief `nbytes` in one run, at an address that 64 KiB divide.
  /// @param may_grow  Whether a further segment may be asked for.
  /// @throws HostMemoryError, std::invalid_argument for 0 bytes
  Id allocate_block(std::size_t nbytes, bool may_grow = true) {
    return allocate(nbytes, true, may_grow);
  }

  /// @brief `nbytes` in as many runs as it takes.
  /// @throws HostMemoryError, std::invalid_argument for 0 bytes
  Id allocate_record(std::size_t nbytes, bool may_grow = true) {
    return allocate(nbytes, false, may_grow);
  }

  /// The runs of an allocation, ascending except that the last may lie anywhere; they hold exactly
  /// the bytes that were asked for.
  std::vector<Run> runs(Id id) const {
    const Allocation& allocation = found(id);
    std::vector<Run> result;
    result.reserve(allocation.spans.size());
    std::size_t rest = allocation.nbytes;
    for (const Span& span : allocation.spans) {
      const std::size_t size = std::min(rest, span.count * granule);
      result.push_back({span.room->segment.data + span.first * granule, size});
      rest -= size;
    }
    return result;
  }

  void release(Id id) {
    const Allocation& allocation = found(id);
    for (const Span& span : allocation.spans) {
      span.room->map.give(span.first, span.count);
      span.room->last_used = step_;
      statistics_.used -= span.count * granule;
    }
    statistics_.live -= allocation.nbytes;
    --statistics_.allocations;
    allocations_.erase(id);
  }

  /// @brief Gives free segments back, those of high addresses first, as long as `keep` bytes or
  /// more stay reserved.
  /// @return how many bytes went.
  std::size_t trim(std::size_t keep) { return release_free_segments(keep, nullptr); }

  std::size_t trim() { return trim(options_.low_water_bytes); }

  /// @brief A step begins: free segments that the last `idle_steps` steps did not use go back, as
  /// long as the low-water mark stays reserved.
  ///
  /// To hold any part of a segment at any time of a step is to use it.
  /// @return how many bytes went.
  std::size_t begin_step(std::uint64_t idle_steps) {
    ++step_;
    const std::uint64_t before = statistics_.trimmed_segments;
    const std::size_t released = release_free_segments(options_.low_water_bytes, &idle_steps);
    statistics_.idle_segments += statistics_.trimmed_segments - before;
    return released;
  }

  const PoolStatistics& statistics() const noexcept { return statistics_; }

  /// Forgets the segments without giving them back: in a forked child, and when the process ends.
  void abandon() noexcept { rooms_.clear(); }

 private:
  /// A segment and what is taken of it.
  struct Room {
    Segment segment;
    GranuleMap map;
    std::uint64_t last_used;  ///< The step in which anything of it was taken or given last.
  };
  struct Span {
    Room* room;
    std::size_t first;
    std::size_t count;
  };
  struct Allocation {
    std::size_t nbytes;
    std::vector<Span> spans;
  };

  std::size_t granules_per_extent() const noexcept { return options_.extent_bytes / granule; }

  const Allocation& found(Id id) const {
    const auto place = allocations_.find(id);
    if (place == allocations_.end()) {
      throw std::invalid_argument("allocation " + std::to_string(id) + " is not live");
    }
    return place->second;
  }

  Id allocate(std::size_t nbytes, bool contiguous, bool may_grow) {
    if (nbytes == 0) throw std::invalid_argument("nbytes must be at least 1, not 0");
    const std::size_t count = rounded_up(nbytes, granule) / granule;
    const bool in_one = contiguous || count < granules_per_extent();
    std::vector<Span> spans;
    if (!place(count, in_one, spans)) {
      if (!may_grow) throw HostMemoryError(refusal(nbytes, "no segment has room for it"));
      grow(nbytes, count, in_one);
      if (!place(count, in_one, spans)) throw std::logic_error("a pool that grew has no room");
    }
    const auto& taken = allocations_.emplace(++last_id_, Allocation{nbytes, std::move(spans)});
    for (const Span& span : taken.first->second.spans) {
      span.room->map.take(span.first, span.count);
      span.room->last_used = step_;
    }
    statistics_.used += count * granule;
    statistics_.live += nbytes;
    statistics_.peak_live = std::max(statistics_.peak_live, statistics_.live);
    ++statistics_.allocations;
    return last_id_;
  }

  /// Finds room for `count` granules and marks nothing; false where there is none.
  bool place(std::size_t count, bool in_one, std::vector<Span>& spans) const {
    spans.clear();
    return in_one ? place_in_one(count, spans) : place_in_extents(count, spans);
  }

  bool place_in_one(std::size_t count, std::vector<Span>& spans) const {
    const bool small = count < granules_per_extent();
    for (const bool beside : {true, false}) {
      if (beside && !small) continue;
      for (const std::unique_ptr<Room>& room : rooms_) {
        const std::optional<std::size_t> first =
            beside ? room->map.room_beside(count) : room->map.room_from_extent(count);
        if (!first) continue;
        spans.push_back({room.get(), *first, count});
        return true;
      }
    }
    return false;
  }

  bool place_in_extents(std::size_t count, std::vector<Span>& spans) const {
    const std::size_t per_extent = granules_per_extent();
    std::size_t extents = count / per_extent;
    const std::size_t tail = count % per_extent;
    if (tail > 0 && !place_beside(tail, spans)) ++extents;
    const std::size_t in_tail = spans.size();
    std::size_t rest = spans.empty() ? count : count - tail;
    for (const std::unique_ptr<Room>& room : rooms_) {
      if (extents == 0) break;
      for (auto extent = room->map.free_extent(0); extent && extents > 0;
           extent = room->map.free_extent(*extent + 1)) {
        const std::size_t first = *extent * per_extent;
        const std::size_t part = std::min(rest, per_extent);
        Span* last = spans.size() > in_tail ? &spans.back() : nullptr;
        if (last != nullptr && last->room == room.get() && last->first + last->count == first) {
          last->count += part;
        } else {
          spans.push_back({room.get(), first, part});
        }
        rest -= part;
        --extents;
      }
    }
    // The tail was found first, to know how many extents are needed; it holds the last bytes.
    std::rotate(spans.begin(), spans.begin() + static_cast<std::ptrdiff_t>(in_tail), spans.end());
    return extents == 0;
  }

  /// Finds `count` granules within an extent in use; false for none.
  bool place_beside(std::size_t count, std::vector<Span>& spans) const {
    if (count == 0) return false;
    for (const std::unique_ptr<Room>& room : rooms_) {
      if (const std::optional<std::size_t> first = room->map.room_beside(count)) {
        spans.push_back({room.get(), *first, count});
        return true;
      }
    }
    return false;
  }

  /// How many bytes a new segment must have so that `count` granules find room.
  std::size_t missing(std::size_t count, bool in_one) const {
    if (in_one) return rounded_up(count * granule, options_.extent_bytes);
    std::vector<Span> tail;
    if (place_beside(count % granules_per_extent(), tail)) count -= tail.front().count;
    std::size_t extents = (count + granules_per_extent() - 1) / granules_per_extent();
    for (const std::unique_ptr<Room>& room : rooms_) extents -= room->map.free_extents();
    return extents * options_.extent_bytes;
  }

  /// Adds a segment in which, with what is free, `count` granules find room.
  void grow(std::size_t nbytes, std::size_t count, bool in_one) {
    const std::size_t need = missing(count, in_one);
    for (bool trimmed = false; true; trimmed = true) {
      try {
        return add(need);
      } catch (const HostMemoryError& error) {
        // A record uses free segments as they are; a block may need them as one larger segment.
        if (!trimmed && in_one && trim(0) > 0) continue;
        ++statistics_.refusals;
        throw HostMemoryError(refusal(nbytes, error.what()));
      }
    }
  }

  std::string refusal(std::size_t nbytes, const std::string& reason) const {
    return "no host memory for " + amount(nbytes) + " (" + std::to_string(nbytes) +
           " bytes): " + reason + "; the pool has " + amount(statistics_.reserved) + " reserved, " +
           amount(statistics_.live) + " of them in use";
  }

  /// A segment of the usual size, or of what the upstream resource allows, but of `need` at least.
  Segment new_segment(std::size_t need) {
    const std::size_t usual = std::max(options_.segment_bytes, need);
    const std::size_t allowed = upstream_.room() / options_.extent_bytes * options_.extent_bytes;
    const std::size_t wanted = std::max(need, std::min(usual, allowed));
    try {
      return upstream_.allocate(wanted);
    } catch (const HostMemoryError&) {
      if (wanted == need) throw;
    }
    return upstream_.allocate(need);
  }

  void add(std::size_t need) {
    const Segment segment = new_segment(need);
    auto room = std::make_unique<Room>(Room{
        segment, GranuleMap(segment.nbytes / options_.extent_bytes, granules_per_extent()), step_});
    const auto place = std::find_if(rooms_.begin(), rooms_.end(), [&](const auto& other) {
      return other->segment.data > segment.data;
    });
    rooms_.insert(place, std::move(room));
    ++statistics_.growths;
    ++statistics_.segments;
    statistics_.reserved += segment.nbytes;
    statistics_.peak_reserved = std::max(statistics_.peak_reserved, statistics_.reserved);
  }

  /// `idle_steps`: only those that so many whole steps did not use.
  std::size_t release_free_segments(std::size_t keep, const std::uint64_t* idle_steps) {
    std::size_t released = 0;
    for (std::size_t i = rooms_.size(); i-- > 0;) {
      const Segment segment = rooms_[i]->segment;
      if (!rooms_[i]->map.empty() || statistics_.reserved < keep + segment.nbytes) continue;
      if (idle_steps != nullptr && step_ - rooms_[i]->last_used <= *idle_steps) continue;
      rooms_.erase(rooms_.begin() + static_cast<std::ptrdiff_t>(i));
      statistics_.reserved -= segment.nbytes;
      --statistics_.segments;
      ++statistics_.trimmed_segments;
      if (upstream_.deallocate(segment)) released += segment.nbytes;
    }
    return released;
  }

  SegmentResource& upstream_;
  PoolOptions options_;
  PoolStatistics statistics_;
  std::vector<std::unique_ptr<Room>> rooms_;  // by ascending address
  std::unordered_map<Id, Allocation> allocations_;
  Id last_id_ = 0;
  std::uint64_t step_ = 0;
};

}  // namespace lowpeak::host
