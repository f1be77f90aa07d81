#pragma once

#include <string_view>

namespace lowpeak {

/// @brief How this library was built; every view points at static storage.
struct BuildInfo {
  std::string_view version;     ///< The project's version, the text of the file VERSION.
  std::string_view compiler;    ///< Name and version, e.g. "gcc 12.2.0".
  std::string_view build_type;  ///< CMake's configuration, e.g. "Release".
  std::string_view sanitizers;  ///< What it was built with, e.g. "address,undefined"; else empty.
  long cxx_standard;            ///< The value of __cplusplus, e.g. 201703.
};

/// @brief Returns how this library was built.
const BuildInfo& build_info() noexcept;

}  // namespace lowpeak
