#include "lowpeak/packing.hpp"

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "check.hpp"

namespace {

using Integers = std::vector<std::int64_t>;

lowpeak::Packing pack(const Integers& lengths, std::int64_t capacity) {
  return lowpeak::best_fit_decreasing(lengths.data(), lengths.size(), capacity);
}

bool refused(const Integers& lengths, std::int64_t capacity) {
  try {
    pack(lengths, capacity);
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

/// The definition, by looking at every bin: of the least space that fits, the bin that has had it
/// for longest.
lowpeak::Packing by_definition(const Integers& lengths, std::int64_t capacity) {
  struct Bin {
    std::int64_t space;
    std::size_t since;
    Integers items;
  };
  std::vector<Bin> bins;
  std::size_t clock = 0;
  for (std::int64_t length = capacity; length > 0; --length) {
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      if (lengths[i] != length) continue;
      Bin* best = nullptr;
      for (Bin& bin : bins) {
        if (bin.space < length) continue;
        const bool better = best == nullptr || bin.space < best->space ||
                            (bin.space == best->space && bin.since < best->since);
        if (better) best = &bin;
      }
      if (best == nullptr) best = &bins.emplace_back(Bin{capacity, 0, {}});
      best->space -= length;
      best->since = clock++;
      best->items.push_back(static_cast<std::int64_t>(i));
    }
  }
  lowpeak::Packing packing{{}, {0}};
  for (const Bin& bin : bins) {
    packing.items.insert(packing.items.end(), bin.items.begin(), bin.items.end());
    packing.offsets.push_back(static_cast<std::int64_t>(packing.items.size()));
  }
  return packing;
}

void small_cases() {
  CHECK(pack({}, 4).items.empty());
  CHECK(pack({}, 4).offsets == Integers{0});
  CHECK(pack({4, 2, 3, 1}, 4).items == (Integers{0, 2, 3, 1}));
  CHECK(pack({4, 2, 3, 1}, 4).offsets == (Integers{0, 1, 3, 4}));
  CHECK(pack({1, 1, 1}, 1).offsets == (Integers{0, 1, 2, 3}));
  CHECK(pack({5, 7, 5}, INT64_MAX).items == (Integers{1, 0, 2}));
  CHECK(pack({5, 7, 5}, INT64_MAX).offsets == (Integers{0, 3}));
}

void refusals() {
  CHECK(refused({}, 0));
  CHECK(refused({1, 0}, 4));
  CHECK(refused({1, -1}, 4));
  CHECK(refused({5}, 4));
}

void follows_the_definition() {
  std::uint64_t state = 1;
  // 4097 and 262145 need three and four levels of 64.
  for (const std::int64_t capacity : {1, 2, 7, 63, 64, 65, 500, 4097, 262145}) {
    for (const std::size_t count : {1, 10, 300}) {
      Integers lengths(capacity > 5000 ? count / 10 + 1 : count);
      for (std::int64_t& length : lengths) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        length =
            1 + static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(capacity));
      }
      const lowpeak::Packing packing = pack(lengths, capacity);
      const lowpeak::Packing expected = by_definition(lengths, capacity);
      CHECK(packing.items == expected.items);
      CHECK(packing.offsets == expected.offsets);
    }
  }
}

}  // namespace

int main() {
  small_cases();
  refusals();
  follows_the_definition();
  return 0;
}
