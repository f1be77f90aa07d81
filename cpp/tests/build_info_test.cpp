#include "lowpeak/build_info.hpp"

#include "check.hpp"

int main() {
  const lowpeak::BuildInfo& info = lowpeak::build_info();
  CHECK(info.version == EXPECTED_VERSION);
  CHECK(info.cxx_standard >= 201703L);
  CHECK(info.compiler.find("unknown") == std::string_view::npos);
  CHECK(!info.build_type.empty());
  CHECK(&info == &lowpeak::build_info());
#if defined(__SANITIZE_ADDRESS__)
  CHECK(info.sanitizers == "address,undefined");
#elif defined(__SANITIZE_THREAD__)
  CHECK(info.sanitizers == "thread");
#else
  CHECK(info.sanitizers.empty());
#endif
  return 0;
}
