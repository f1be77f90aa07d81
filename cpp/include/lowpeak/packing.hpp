#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace lowpeak {

/// @brief Which items share a bin: bin b holds items[offsets[b]] up to items[offsets[b + 1] - 1].
struct Packing {
  std::vector<std::int64_t> items;    ///< Indices of the items, bin after bin.
  std::vector<std::int64_t> offsets;  ///< One more than there are bins; the first is 0.
};

namespace detail {

/// A set of integers in [0, size) that finds the next member in O(log64 size).
class OrderedSet {
 public:
  explicit OrderedSet(std::size_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size);
    } while (size > 1);
  }

  void insert(std::size_t value) noexcept {
    for (auto& words : levels_) {
      words[value / 64] |= std::uint64_t{1} << (value % 64);
      value /= 64;
    }
  }

  void erase(std::size_t value) noexcept {
    for (auto& words : levels_) {
      words[value / 64] &= ~(std::uint64_t{1} << (value % 64));
      if (words[value / 64] != 0) return;
      value /= 64;
    }
  }

  /// The smallest member >= value, or `none` where there is no such member.
  std::size_t next(std::size_t value, std::size_t none) const noexcept {
    for (std::size_t level = 0; level < levels_.size(); ++level) {
      const std::size_t word = value / 64;
      if (word >= levels_[level].size()) return none;
      const std::uint64_t rest = levels_[level][word] >> (value % 64);
      if (rest != 0) return descend(level, value + lowest_bit(rest));
      value = word + 1;
    }
    return none;
  }

 private:
  std::size_t descend(std::size_t level, std::size_t value) const noexcept {
    while (level-- > 0) value = 64 * value + lowest_bit(levels_[level][value]);
    return value;
  }

  static std::size_t lowest_bit(std::uint64_t word) noexcept {
    std::size_t bit = 0;
    for (std::size_t step = 32; step > 0; step /= 2) {
      if ((word & ((std::uint64_t{1} << step) - 1)) == 0) {
        word >>= step;
        bit += step;
      }
    }
    return bit;
  }

  std::vector<std::vector<std::uint64_t>> levels_;
};

/// First-in, first-out queues of bins, one for each remaining space; a bin waits in one at a time.
class OpenBins {
 public:
  explicit OpenBins(std::size_t capacity)
      : spaces_(capacity + 1), first_(capacity + 1, nobody), last_(capacity + 1, nobody) {}

  /// The smallest remaining space of an open bin that takes `length`, or `none`.
  std::size_t best_space(std::size_t length, std::size_t none) const noexcept {
    return spaces_.next(length, none);
  }

  std::int64_t pop(std::size_t space) noexcept {
    const std::int64_t bin = first_[space];
    first_[space] = after_[static_cast<std::size_t>(bin)];
    if (first_[space] == nobody) spaces_.erase(space);
    return bin;
  }

  /// Adds a bin that is new or was popped.
  void push(std::size_t space, std::int64_t bin) {
    if (static_cast<std::size_t>(bin) == after_.size()) after_.push_back(nobody);
    after_[static_cast<std::size_t>(bin)] = nobody;
    if (first_[space] == nobody) {
      first_[space] = bin;
      spaces_.insert(space);
    } else {
      after_[static_cast<std::size_t>(last_[space])] = bin;
    }
    last_[space] = bin;
  }

 private:
  static constexpr std::int64_t nobody = -1;
  OrderedSet spaces_;
  std::vector<std::int64_t> first_;
  std::vector<std::int64_t> last_;
  std::vector<std::int64_t> after_;
};

/// The sum of the lengths, each of which must lie in [1, capacity].
inline std::int64_t checked_sum(const std::int64_t* lengths, std::size_t count,
                                std::int64_t capacity) {
  if (capacity < 1) {
    throw std::invalid_argument("capacity must be at least 1, not " + std::to_string(capacity));
  }
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (lengths[i] < 1 || lengths[i] > capacity) {
      throw std::invalid_argument("lengths[" + std::to_string(i) + "] is " +
                                  std::to_string(lengths[i]) + ", outside 1.." +
                                  std::to_string(capacity));
    }
    sum = lengths[i] > INT64_MAX - sum ? INT64_MAX : sum + lengths[i];
  }
  return sum;
}

/// Indices by descending length; equal lengths keep their order.
inline std::vector<std::int64_t> longest_first(const std::int64_t* lengths, std::size_t count,
                                               std::size_t capacity) {
  std::vector<std::int64_t> order(count);
  std::vector<std::size_t> start(capacity + 2);
  for (std::size_t i = 0; i < count; ++i)
    ++start[capacity - static_cast<std::size_t>(lengths[i]) + 1];
  std::partial_sum(start.begin(), start.end(), start.begin());
  for (std::size_t i = 0; i < count; ++i) {
    order[start[capacity - static_cast<std::size_t>(lengths[i])]++] = static_cast<std::int64_t>(i);
  }
  return order;
}

/// Groups the items by bin; those of one bin keep the order they came in.
inline Packing grouped(const std::vector<std::int64_t>& order,
                       const std::vector<std::int64_t>& bins, std::size_t bin_count) {
  Packing packing;
  packing.items.resize(order.size());
  packing.offsets.resize(bin_count + 1);
  for (const std::int64_t bin : bins) ++packing.offsets[static_cast<std::size_t>(bin) + 1];
  std::partial_sum(packing.offsets.begin(), packing.offsets.end(), packing.offsets.begin());
  std::vector<std::int64_t> place(packing.offsets.begin(), packing.offsets.end() - 1);
  for (std::size_t k = 0; k < order.size(); ++k) {
    packing.items[static_cast<std::size_t>(place[static_cast<std::size_t>(bins[k])]++)] = order[k];
  }
  return packing;
}

}  // namespace detail

/// @brief Best-fit decreasing bin packing in O(N log64 C + C).
///
/// The longest item goes first, equal lengths in their own order; each goes to the bin with the
/// least space that takes it, and among equal spaces to the bin that has had it for longest. Bins
/// are numbered as they are opened. The result depends on nothing but the arguments.
///
/// @param lengths  `count` lengths, each in [1, capacity].
/// @param capacity  What a bin holds.
/// @throws std::invalid_argument for a length or a capacity out of range.
inline Packing best_fit_decreasing(const std::int64_t* lengths, std::size_t count,
                                   std::int64_t capacity) {
  const std::int64_t sum = detail::checked_sum(lengths, count, capacity);
  if (count == 0) return Packing{{}, {0}};
  // A bin that takes everything packs as any larger one does, so tables need not be larger.
  const auto space_of_new = static_cast<std::size_t>(std::min(capacity, sum));
  const std::vector<std::int64_t> order = detail::longest_first(lengths, count, space_of_new);
  std::vector<std::int64_t> bins(count);
  detail::OpenBins open(space_of_new);
  std::int64_t bin_count = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const auto length = static_cast<std::size_t>(lengths[order[k]]);
    const std::size_t space = open.best_space(length, space_of_new);
    const std::int64_t bin = space == space_of_new ? bin_count++ : open.pop(space);
    bins[k] = bin;
    open.push(space - length, bin);
  }
  return detail::grouped(order, bins, static_cast<std::size_t>(bin_count));
}

}  // namespace lowpeak
