#pragma once

#include <cstdio>
#include <cstdlib>

/// Ends the test when the condition is false; unlike assert() it also works in Release builds.
#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

/// Ends the test unless the expression throws the exception.
#define CHECK_THROWS(expression, exception)                                                 \
  do {                                                                                      \
    bool thrown = false;                                                                    \
    try {                                                                                   \
      static_cast<void>(expression);                                                        \
    } catch (const exception&) {                                                            \
      thrown = true;                                                                        \
    }                                                                                       \
    if (!thrown) {                                                                          \
      std::fprintf(stderr, "%s:%d: %s did not throw %s\n", __FILE__, __LINE__, #expression, \
                   #exception);                                                             \
      std::exit(1);                                                                         \
    }                                                                                       \
  } while (false)
