#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lowpeak::host {

/// @brief Which granules of a segment are taken: a bitmap, cut into extents of equal size.
///
/// Large demands take whole extents, small ones a part of one; so small ones never spread over
/// extents that large ones need.
class GranuleMap {
 public:
  GranuleMap(std::size_t extents, std::size_t granules_per_extent)
      : per_extent_(granules_per_extent),
        free_extents_(extents),
        used_(extents),
        words_((extents * granules_per_extent + 63) / 64) {}

  std::size_t extents() const noexcept { return used_.size(); }
  std::size_t free_extents() const noexcept { return free_extents_; }
  bool empty() const noexcept { return free_extents_ == used_.size(); }

  /// The first free extent at or after `from`.
  std::optional<std::size_t> free_extent(std::size_t from) const noexcept {
    if (free_extents_ == 0) return std::nullopt;
    for (std::size_t extent = from; extent < used_.size(); ++extent) {
      if (used_[extent] == 0) return extent;
    }
    return std::nullopt;
  }

  /// The first granule of the lowest `count` adjacent free ones within an extent in use.
  std::optional<std::size_t> room_beside(std::size_t count) const noexcept {
    for (std::size_t extent = 0; extent < used_.size(); ++extent) {
      if (used_[extent] == 0 || per_extent_ - used_[extent] < count) continue;
      std::size_t run = 0;
      for (std::size_t i = extent * per_extent_; i < (extent + 1) * per_extent_; ++i) {
        run = taken(i) ? 0 : run + 1;
        if (run == count) return i + 1 - count;
      }
    }
    return std::nullopt;
  }

  /// The first granule of the lowest `count` adjacent free ones that begin with an extent.
  std::optional<std::size_t> room_from_extent(std::size_t count) const noexcept {
    const std::size_t whole = count / per_extent_;
    const std::size_t tail = count % per_extent_;
    for (std::size_t begin = 0; begin + whole + (tail > 0 ? 1 : 0) <= used_.size(); ++begin) {
      std::size_t n = 0;
      while (n < whole && used_[begin + n] == 0) ++n;
      if (n == whole && all_free((begin + whole) * per_extent_, tail)) return begin * per_extent_;
      begin += n;  // what stopped the run is in use, as a whole extent and as a tail
    }
    return std::nullopt;
  }

  void take(std::size_t first, std::size_t count) noexcept {
    by_words(first, count,
             [this](std::size_t extent, std::uint64_t& word, std::uint64_t mask,
                    std::uint32_t granules) {
               assert((word & mask) == 0);
               word |= mask;
               if (used_[extent] == 0) --free_extents_;
               used_[extent] += granules;
             });
  }

  void give(std::size_t first, std::size_t count) noexcept {
    by_words(first, count,
             [this](std::size_t extent, std::uint64_t& word, std::uint64_t mask,
                    std::uint32_t granules) {
               assert((word & mask) == mask);
               word &= ~mask;
               used_[extent] -= granules;
               if (used_[extent] == 0) ++free_extents_;
             });
  }

  bool taken(std::size_t granule) const noexcept {
    return (words_[granule / 64] >> (granule % 64) & 1) != 0;
  }

 private:
  /// Calls `change` for each part of a range that lies in one word and one extent.
  template <typename Change>
  void by_words(std::size_t first, std::size_t count, Change change) noexcept {
    for (std::size_t n = 0; count > 0; first += n, count -= n) {
      const std::size_t bit = first % 64;
      n = std::min({count, 64 - bit, per_extent_ - first % per_extent_});
      const std::uint64_t ones = ~std::uint64_t{0} >> (64 - n);
      change(first / per_extent_, words_[first / 64], ones << bit, static_cast<std::uint32_t>(n));
    }
  }

  bool all_free(std::size_t first, std::size_t count) const noexcept {
    for (std::size_t i = first; i < first + count; ++i) {
      if (taken(i)) return false;
    }
    return true;
  }

  std::size_t per_extent_;
  std::size_t free_extents_;
  std::vector<std::uint32_t> used_;  // granules taken, by extent
  std::vector<std::uint64_t> words_;
};

}  // namespace lowpeak::host
