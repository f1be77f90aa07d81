// Stands for libcuda.so.1 and libamdhip64.so where there is no GPU: the same symbols, the same
// answers, and FAKE_FAIL names the call that fails, FAKE_CODE how. -DWITHOUT_REGISTER and
// -DWITHOUT_HOST_FUNCTION leave a symbol out.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

int current_device = 7;
void* current_context = nullptr;
int contexts[2];

int failing(const char* call) {
  const char* name = std::getenv("FAKE_FAIL");
  if (name == nullptr || std::strcmp(name, call) != 0) return 0;
  const char* code = std::getenv("FAKE_CODE");
  return code == nullptr ? 2 : std::atoi(code);
}

/// A call outside a context is an error of the caller.
int in_context(const char* call) { return current_context == nullptr ? 201 : failing(call); }

int on_device(const char* call) { return current_device != 1 ? 101 : failing(call); }

int allocate(void** data, std::size_t nbytes) {
  *data = ::operator new(nbytes, std::align_val_t{4096});
  return 0;
}

int release(void* data) {
  ::operator delete(data, std::align_val_t{4096});
  return 0;
}

/// FAKE_INTEGRATED: the attribute that says so, as its number.
int attribute(int* value, int asked) {
  const char* integrated = std::getenv("FAKE_INTEGRATED");
  *value = integrated != nullptr && std::atoi(integrated) == asked ? 1 : 0;
  return failing("attribute");
}

int bus_id(char* text, int size, int device) {
  std::snprintf(text, static_cast<std::size_t>(size), "0000:%02X:00.0", device + 0xA0);
  return failing("pci_bus_id");
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return failing("init"); }
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 || ordinal == 1 ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device];
  return failing("retain");
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 2 ? "out of memory" : nullptr;
  return 0;
}
int cuDeviceGetAttribute(int* value, int asked, int) { return attribute(value, asked); }
int cuDeviceGetPCIBusId(char* text, int size, int device) { return bus_id(text, size, device); }
int cuCtxPushCurrent_v2(void* context) {
  if (const int code = failing("push")) return code;
  current_context = context;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = current_context;
  current_context = nullptr;
  return 0;
}
#ifndef WITHOUT_REGISTER
int cuMemHostRegister_v2(void*, std::size_t, unsigned flags) {
  return flags != 1 ? 1 : in_context("register");
}
#endif
int cuMemHostUnregister(void*) { return in_context("unregister"); }
int cuMemHostAlloc(void** data, std::size_t nbytes, unsigned flags) {
  const int code = flags != 1 ? 1 : in_context("allocate");
  return code == 0 ? allocate(data, nbytes) : code;
}
int cuMemFreeHost(void* data) {
  const int code = in_context("free");
  return code == 0 ? release(data) : code;
}

int cuStreamCreate(std::uintptr_t* stream, unsigned flags) {
  *stream = 21;
  return flags != 1 ? 1 : in_context("create_stream");
}
int cuStreamDestroy_v2(std::uintptr_t) { return in_context("destroy_stream"); }
int cuStreamSynchronize(std::uintptr_t) { return in_context("synchronize"); }
int cuStreamWaitEvent(std::uintptr_t, std::uintptr_t event, unsigned flags) {
  return flags != 0 || event != 22 ? 1 : in_context("wait");
}
int cuEventCreate(std::uintptr_t* event, unsigned flags) {
  *event = 22;
  return flags != 2 ? 1 : in_context("create_event");
}
int cuEventDestroy_v2(std::uintptr_t) { return in_context("destroy_event"); }
int cuEventRecord(std::uintptr_t event, std::uintptr_t) {
  return event != 22 ? 1 : in_context("record");
}
int cuEventQuery(std::uintptr_t) { return in_context("query"); }
int cuEventSynchronize(std::uintptr_t) { return in_context("synchronize"); }
#ifndef WITHOUT_REGISTER
int cuMemcpyDtoHAsync_v2(void* host, std::uintptr_t device, std::size_t nbytes, std::uintptr_t) {
  std::memcpy(host, reinterpret_cast<void*>(device), nbytes);
  return in_context("copy_out");
}
#endif
int cuMemcpyHtoDAsync_v2(std::uintptr_t device, const void* host, std::size_t nbytes,
                         std::uintptr_t) {
  std::memcpy(reinterpret_cast<void*>(device), host, nbytes);
  return in_context("copy_in");
}
#ifndef WITHOUT_HOST_FUNCTION
int cuLaunchHostFunc(std::uintptr_t, void (*function)(void*), void* data) {
  const int code = in_context("run_on_host");
  if (code == 0) function(data);
  return code;
}
#endif
void* fake_context() { return current_context; }

int hipInit(unsigned) { return failing("init"); }
int hipGetDeviceCount(int* count) {
  *count = 2;
  return 0;
}
const char* hipGetErrorString(int code) { return code == 2 ? "out of memory" : nullptr; }
int hipDeviceGetAttribute(int* value, int asked, int) { return attribute(value, asked); }
int hipDeviceGetPCIBusId(char* text, int size, int device) { return bus_id(text, size, device); }
int hipGetDevice(int* device) {
  *device = current_device;
  return 0;
}
int hipSetDevice(int device) {
  if (const int code = failing("push")) return code;
  current_device = device;
  return 0;
}
#ifndef WITHOUT_REGISTER
int hipHostRegister(void*, std::size_t, unsigned flags) {
  return flags != 1 ? 1 : on_device("register");
}
#endif
int hipHostUnregister(void*) { return on_device("unregister"); }
int hipHostMalloc(void** data, std::size_t nbytes, unsigned flags) {
  const int code = flags != 1 ? 1 : on_device("allocate");
  return code == 0 ? allocate(data, nbytes) : code;
}
int hipHostFree(void* data) {
  const int code = on_device("free");
  return code == 0 ? release(data) : code;
}
int hipStreamCreateWithFlags(std::uintptr_t* stream, unsigned flags) {
  *stream = 21;
  return flags != 1 ? 1 : on_device("create_stream");
}
int hipStreamDestroy(std::uintptr_t) { return on_device("destroy_stream"); }
int hipStreamSynchronize(std::uintptr_t) { return on_device("synchronize"); }
int hipStreamWaitEvent(std::uintptr_t, std::uintptr_t event, unsigned flags) {
  return flags != 0 || event != 22 ? 1 : on_device("wait");
}
int hipEventCreateWithFlags(std::uintptr_t* event, unsigned flags) {
  *event = 22;
  return flags != 2 ? 1 : on_device("create_event");
}
int hipEventDestroy(std::uintptr_t) { return on_device("destroy_event"); }
int hipEventRecord(std::uintptr_t event, std::uintptr_t) {
  return event != 22 ? 1 : on_device("record");
}
int hipEventQuery(std::uintptr_t) { return on_device("query"); }
int hipEventSynchronize(std::uintptr_t) { return on_device("synchronize"); }
#ifndef WITHOUT_REGISTER
int hipMemcpyDtoHAsync(void* host, std::uintptr_t device, std::size_t nbytes, std::uintptr_t) {
  std::memcpy(host, reinterpret_cast<void*>(device), nbytes);
  return on_device("copy_out");
}
#endif
int hipMemcpyHtoDAsync(std::uintptr_t device, const void* host, std::size_t nbytes,
                       std::uintptr_t) {
  std::memcpy(reinterpret_cast<void*>(device), host, nbytes);
  return on_device("copy_in");
}
#ifndef WITHOUT_HOST_FUNCTION
int hipLaunchHostFunc(std::uintptr_t, void (*function)(void*), void* data) {
  const int code = on_device("run_on_host");
  if (code == 0) function(data);
  return code;
}
#endif
int fake_device() { return current_device; }
}
