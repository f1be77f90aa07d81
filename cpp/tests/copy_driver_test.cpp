// The streams of CUDA and HIP over fake drivers; CTest sets where they lie.

#include <dlfcn.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "check.hpp"
#include "lowpeak/copy/backends.hpp"
#include "lowpeak/copy/copy_engine.hpp"
#include "lowpeak/host/sim_driver.hpp"

using namespace lowpeak::copy;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

/// Lets one call of the fake fail with a code while it lives.
struct Failing {
  Failing(const char* call, const char* code) {
    setenv("FAKE_FAIL", call, 1);
    setenv("FAKE_CODE", code, 1);
  }
  Failing(const Failing&) = delete;
  Failing& operator=(const Failing&) = delete;
  ~Failing() {
    unsetenv("FAKE_FAIL");
    unsetenv("FAKE_CODE");
  }
};

template <typename Result>
Result ask_fake(const char* library, const char* symbol) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  CHECK(handle != nullptr);
  Result (*function)() = reinterpret_cast<Result (*)()>(dlsym(handle, symbol));
  CHECK(function != nullptr);
  dlclose(handle);
  return function();
}

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

std::shared_ptr<lowpeak::host::HostPool> make_pool() {
  lowpeak::host::HostPoolOptions options;
  options.pool = {2 * MiB, 2 * MiB, 0};
  return std::make_shared<lowpeak::host::HostPool>(std::make_shared<lowpeak::host::SimDriver>(),
                                                   options);
}

void each_call_tells_its_error(const std::string& backend, const std::string& prefix) {
  CopyEngine engine(make_pool(), make_streams(backend, 1, "", 0));
  CHECK(engine.name() == backend);
  unsigned char source[3] = {1, 2, 3}, target[3] = {};
  const auto from = reinterpret_cast<std::uintptr_t>(source);
  const auto to = reinterpret_cast<std::uintptr_t>(target);
  const auto room = engine.allocate(3);
  const Ticket out = engine.copy_out(room, from, 3, 5);
  const Ticket in = engine.copy_in(room, to, 3, 5, out);
  CHECK(target[2] == 3);
  CHECK(engine.done(in));
  engine.wait(in, 5);
  engine.follow(5, 6);
  engine.synchronize();
  {
    const Failing failing("query", "600");
    CHECK(!engine.done(in));
  }
  CHECK(engine.done(in));
  const std::string text = prefix + " error 2, out of memory";
  const auto fails = [&](const char* call, const std::function<void()>& action) {
    const Failing failing(call, "2");
    return error_of(action).find(text) != std::string::npos;
  };
  CHECK(fails("query", [&] { engine.done(in); }));
  CHECK(fails("wait", [&] { engine.wait(in, 5); }));
  CHECK(fails("record", [&] { engine.follow(5, 6); }));
  CHECK(fails("copy_out", [&] { engine.copy_out(room, from, 3, 5); }));
  CHECK(fails("copy_in", [&] { engine.copy_in(room, to, 3, 5, out); }));
  CHECK(fails("synchronize", [&] { engine.synchronize(); }));
  const auto plain = engine.allocate_plain(3);
  const Ticket there = engine.copy_out(plain, from, 3, 5);
  unsigned char again[3] = {};
  engine.copy_in(plain, reinterpret_cast<std::uintptr_t>(again), 3, 5, there);
  CHECK(again[2] == 3);
  CHECK(fails("run_on_host", [&] { engine.copy_out(plain, from, 3, 5); }));
  CHECK(fails("push", [&] { engine.done(in); }));
  CHECK(fails("create_stream", [&] { CopyEngine(make_pool(), make_streams(backend, 1, "", 0)); }));
  CHECK(engine.done(in));
  {
    const Failing failing("query", "700");
    CHECK(error_of([&] { engine.done(in); }).find(prefix + " error 700") != std::string::npos);
  }
  CHECK(error_of([&] { engine.done(in); }).find("the device was lost before") == 0);
}

void each_lacks_a_symbol() {
  CHECK(error_of([] { make_streams("cuda", 0, "", 0); }) ==
        "libcuda.so.1 has no cuMemcpyDtoHAsync_v2");
  CHECK(error_of([] { make_streams("hip", 0, "", 0); }) ==
        "libamdhip64.so has no hipMemcpyDtoHAsync");
}

/// An old driver has no way to plain memory, and all else.
void copies_without_functions_of_the_host(const std::string& backend) {
  CopyEngine engine(make_pool(), make_streams(backend, 1, "", 0));
  unsigned char source[3] = {1, 2, 3}, target[3] = {};
  const auto room = engine.allocate(3);
  const Ticket out = engine.copy_out(room, reinterpret_cast<std::uintptr_t>(source), 3, 5);
  engine.copy_in(room, reinterpret_cast<std::uintptr_t>(target), 3, 5, out);
  CHECK(target[2] == 3);
  CHECK(error_of([&] { engine.allocate_plain(3); }) ==
        "no way to plain memory: the driver runs no functions of the host");
}

}  // namespace

int main(int, char** arguments) {
  if (arguments[1] == std::string("without_symbol")) {
    each_lacks_a_symbol();
    return 0;
  }
  if (arguments[1] == std::string("without_host_function")) {
    copies_without_functions_of_the_host("cuda");
    copies_without_functions_of_the_host("hip");
    return 0;
  }
  each_call_tells_its_error("cuda", "CUDA");
  each_call_tells_its_error("hip", "HIP");
  // The calls leave the thread's context and device as they were.
  CHECK(ask_fake<void*>("libcuda.so.1", "fake_context") == nullptr);
  CHECK(ask_fake<int>("libamdhip64.so", "fake_device") == 7);
  return 0;
}
