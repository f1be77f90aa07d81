// The CUDA and HIP tables over fake drivers: symbols, contexts, errors; CTest sets where they lie.

#include <dlfcn.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "check.hpp"
#include "lowpeak/host/backends.hpp"
#include "lowpeak/host/block.hpp"

using namespace lowpeak::host;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

/// Lets one call of the fake fail while it lives.
struct Failing {
  explicit Failing(const char* call) { setenv("FAKE_FAIL", call, 1); }
  Failing(const Failing&) = delete;
  Failing& operator=(const Failing&) = delete;
  ~Failing() { unsetenv("FAKE_FAIL"); }
};

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const BackendError& error) {
    return error.what();
  }
  return "";
}

template <typename Result>
Result ask_fake(const char* library, const char* symbol) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  CHECK(handle != nullptr);
  Result (*function)() = reinterpret_cast<Result (*)()>(dlsym(handle, symbol));
  CHECK(function != nullptr);
  dlclose(handle);
  return function();
}

/// The calls leave the thread's context and device as they were.
void nothing_is_left_current() {
  CHECK(ask_fake<void*>("libcuda.so.1", "fake_context") == nullptr);
  CHECK(ask_fake<int>("libamdhip64.so", "fake_device") == 7);
}

template <typename Table>
void answers(Table& driver, const std::string& prefix, const char* integrated) {
  CHECK(!driver.integrated());
  setenv("FAKE_INTEGRATED", integrated, 1);
  CHECK(driver.integrated());
  {
    const Failing failing("attribute");
    CHECK(!driver.integrated());
  }
  unsetenv("FAKE_INTEGRATED");
  std::byte memory[4];
  void* data = nullptr;
  CHECK(driver.pins());
  CHECK(driver.register_host(memory, sizeof memory).ok);
  CHECK(driver.unregister_host(memory).ok);
  CHECK(driver.allocate_host(MiB, &data).ok);
  CHECK(driver.free_host(data).ok);
  CHECK(driver.numa_node() == -1);  // no machine has a device of that number
  for (const char* call : {"register", "unregister", "allocate", "push"}) {
    const Failing failing(call);
    const bool allocates = std::string(call) == "allocate";
    const Outcome outcome = allocates ? driver.allocate_host(MiB, &data)
                            : std::string(call) == "unregister"
                                ? driver.unregister_host(memory)
                                : driver.register_host(memory, sizeof memory);
    CHECK(!outcome.ok);
    CHECK(outcome.error.find(prefix + " error 2, out of memory") != std::string::npos);
  }
  {
    const Failing failing("pci_bus_id");
    CHECK(driver.numa_node() == -1);
  }
  nothing_is_left_current();
}

void a_pool_over(const char* backend) {
  HostPoolOptions options;
  options.pool = {8 * MiB, 2 * MiB, 0};
  options.budget.limit = 16 * MiB;
  std::string why;
  const auto driver = make_driver(backend, 1, &why);
  CHECK(driver->name() == std::string(backend));
  CHECK(driver == make_driver(backend, 1, &why));
  const auto pool = std::make_shared<HostPool>(driver, options);
  {
    const Block block(pool, 100);
    const Failing failing("register");
    const Block from_the_driver(pool, 8 * MiB);
    CHECK(pool->statistics().pin.driver_segments == 1);
    CHECK(pool->statistics().pin.register_failures == 2);
    from_the_driver.data()[8 * MiB - 1] = std::byte{1};
  }
  CHECK(pool->trim({}) == 16 * MiB);
}

void working_drivers() {
  CudaDriver cuda(1);
  HipDriver hip(1);
  answers(cuda, "CUDA", "18");
  answers(hip, "HIP", "16");
  a_pool_over("cuda");
  a_pool_over("hip");
  std::string why;
  CHECK(make_driver("auto", 1, &why)->name() == std::string("cuda"));
  CHECK(why.empty());
}

void drivers_that_do_not_start() {
  CHECK(refusal([] { CudaDriver(2); }) == "cuDeviceGet: CUDA error 101, unknown");
  CHECK(refusal([] { HipDriver(2); }) == "there is no HIP device 2, only 2");
  {
    const Failing failing("init");
    CHECK(refusal([] { CudaDriver(0); }) == "cuInit: CUDA error 2, out of memory");
    CHECK(refusal([] { HipDriver(0); }) == "hipInit: HIP error 2, out of memory");
    std::string why;
    CHECK(make_driver("auto", 0, &why)->name() == std::string("null"));
    CHECK(why == "cuInit: CUDA error 2, out of memory; hipInit: HIP error 2, out of memory");
  }
  const Failing failing("retain");
  CHECK(refusal([] { CudaDriver(0); }) == "cuDevicePrimaryCtxRetain: CUDA error 2, out of memory");
}

void drivers_without_a_symbol() {
  CHECK(refusal([] { CudaDriver(0); }) == "libcuda.so.1 has no cuMemHostRegister_v2");
  CHECK(refusal([] { HipDriver(0); }) == "libamdhip64.so has no hipHostRegister");
}

}  // namespace

int main(int, char** arguments) {
  if (arguments[1] == std::string("without_symbol")) {
    drivers_without_a_symbol();
    return 0;
  }
  drivers_that_do_not_start();
  working_drivers();
  return 0;
}
