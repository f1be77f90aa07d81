#pragma once

namespace lowpeak::host {

/// @brief A function of a driver that is opened at run time.
struct DynamicCall {
  const char* symbol;  ///< What the library exports.
  const char* name;    ///< What its documentation and our errors call it.

  /// A function that is exported under its own name.
  constexpr DynamicCall(const char* plain) : symbol(plain), name(plain) {}
  constexpr DynamicCall(const char* exported, const char* plain) : symbol(exported), name(plain) {}
};

}  // namespace lowpeak::host
