#include "lowpeak/build_info.hpp"

#define LOWPEAK_STRINGIFY_(x) #x
#define LOWPEAK_STRINGIFY(x) LOWPEAK_STRINGIFY_(x)

// clang defines __GNUC__ too, so it is asked for first.
#if defined(__clang__)
#define LOWPEAK_COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define LOWPEAK_COMPILER "gcc " __VERSION__
#elif defined(_MSC_VER)
#define LOWPEAK_COMPILER "msvc " LOWPEAK_STRINGIFY(_MSC_VER)
#else
#define LOWPEAK_COMPILER "unknown"
#endif

// MSVC keeps __cplusplus at 199711 unless asked; _MSVC_LANG is the truth there.
#if defined(_MSVC_LANG)
#define LOWPEAK_CXX_STANDARD _MSVC_LANG
#else
#define LOWPEAK_CXX_STANDARD __cplusplus
#endif

namespace lowpeak {

const BuildInfo& build_info() noexcept {
  static constexpr BuildInfo info{LOWPEAK_VERSION, LOWPEAK_COMPILER, LOWPEAK_BUILD_TYPE,
                                  LOWPEAK_SANITIZERS, LOWPEAK_CXX_STANDARD};
  return info;
}

}  // namespace lowpeak
