#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string_view>

namespace lowpeak::host {

/// @brief The calls to the system and the driver that can fail.
enum class Site : std::size_t { map, thread, register_host, allocate_host, unregister_host };

inline constexpr std::array<std::string_view, 5> site_names{"map", "thread", "register_host",
                                                            "allocate_host", "unregister_host"};

/// @throws std::invalid_argument for a name that is none of `site_names`.
inline Site site_named(std::string_view name) {
  for (std::size_t i = 0; i < site_names.size(); ++i) {
    if (site_names[i] == name) return static_cast<Site>(i);
  }
  throw std::invalid_argument(
      "site is none of map, thread, register_host, allocate_host, "
      "unregister_host");
}

/// @brief Lets chosen calls fail, so that tests reach every path of a failure.
///
/// Not synchronised: its owner's lock guards it.
template <typename Place, std::size_t count>
class FaultPlans {
 public:
  /// The next `skip` calls of the site succeed, `times` calls after them fail.
  void fail(Place site, std::uint64_t skip, std::uint64_t times) noexcept {
    plans_[static_cast<std::size_t>(site)] = {skip, times};
  }

  /// Counts one call of the site; whether it is to fail.
  bool strikes(Place site) noexcept {
    Plan& plan = plans_[static_cast<std::size_t>(site)];
    if (plan.times == 0) return false;
    if (plan.skip > 0) {
      --plan.skip;
      return false;
    }
    --plan.times;
    return true;
  }

 private:
  struct Plan {
    std::uint64_t skip = 0;
    std::uint64_t times = 0;
  };
  std::array<Plan, count> plans_{};
};

using FaultInjector = FaultPlans<Site, site_names.size()>;

}  // namespace lowpeak::host
