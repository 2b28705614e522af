// Devices and their properties, errors, the record of calls, and the driver's functions.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "kernels.h"
#include "runtime.h"

namespace fake_cuda {
namespace {

// Nothing here is destroyed: programs call CUDA until their very end.
std::recursive_mutex& mutex = *new std::recursive_mutex;
int depth = 0;  // number of locks held by the thread with the mutex
auto& discarded = *new std::vector<std::shared_ptr<const void>>;

constexpr size_t kText = 4096;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaError_t explained = cudaSuccess;  // by `reason`
thread_local char reason[kText];
bool is_recording = false;
std::string& recorded = *new std::string;

uint64_t number(const char* name) {
  const char* const value = getenv(name);
  return value ? strtoull(value, nullptr, 10) : 0;
}

void set_order(Settings& settings, const std::string& order) {
  settings.order = order == "now" ? Order::now : order == "late" ? Order::late : Order::random;
  settings.generator.seed(strtoull(order.c_str(), nullptr, 10));
}

Settings read_settings() {  // which the command sets, but for the driver's version
  Settings read{.devices = static_cast<int>(number("FAKE_CUDA_DEVICES")),
                .multiprocessors = static_cast<int>(number("FAKE_CUDA_MULTIPROCESSORS")),
                .capability = static_cast<int>(number("FAKE_CUDA_CAPABILITY")),
                .driver = static_cast<int>(number("FAKE_CUDA_DRIVER")),
                .memory = number("FAKE_CUDA_MEMORY"),
                .guarded = number("FAKE_CUDA_GUARDED") != 0};
  set_order(read, getenv("FAKE_CUDA_ORDER"));
  if (read.driver == 0) read.driver = CUDART_VERSION;
  return read;
}

// The text of CUDA's own library for an error; it needs no driver.
const char* cudas_text(cudaError_t error, const char* function) {
  using Text = const char* (*)(cudaError_t);
  static void* const library = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_LOCAL);
  const auto text = library ? reinterpret_cast<Text>(dlsym(library, function)) : nullptr;
  return text ? text(error) : "an error of the fake CUDA runtime";
}

// Loads torch's CPU kernels in place of its CUDA kernels, before torch can use a device.
void load_fallback() {
  static const bool loaded = [] {
    const char* const path = getenv("FAKE_CUDA_FALLBACK");
    if (path && !dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
      say(dlerror());
      abort();
    }
    return true;
  }();
  (void)loaded;
}

}  // namespace

Settings& settings() {
  static Settings& instance = *new Settings(read_settings());
  return instance;
}

size_t most_shared() {
  switch (settings().capability) {
    case 75: return 64 << 10;
    case 80: return 163 << 10;
    case 86:
    case 89:
    case 120: return 99 << 10;
    default: return 227 << 10;
  }
}

Lock::Lock() {
  mutex.lock();
  ++depth;
}

Lock::~Lock() {
  std::vector<std::shared_ptr<const void>> last;
  if (--depth == 0) last.swap(discarded);
  mutex.unlock();
}

void discard(std::shared_ptr<const void> kept) { discarded.push_back(std::move(kept)); }

cudaError_t done(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t refuse(cudaError_t error, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  explained = error;
  return done(error);
}

void say(const char* text) { fprintf(stderr, "fake cuda: %s\n", text ? text : reason); }

void record(const char* kind, const std::string& what) {
  if (is_recording) recorded += kind + ("\t" + what + "\n");
}

}  // namespace fake_cuda

using namespace fake_cuda;

// A function of CUDA that is not here; see build.py.
extern "C" int fake_cuda_missing(const char* name) {
  say((std::string(name) + " is missing").c_str());
  return refuse(cudaErrorNotSupported, "%s is missing", name);
}

// The order of the operations to come: "now", "late" or a seed.
FAKE_CUDA_API void fake_cuda_set_order(const char* order) {
  FAKE_CUDA_LOCK;
  run_all();
  set_order(settings(), order);
}

// Gives each device so many multiprocessors, in torch's copies of the properties too. Returns their
// number before.
FAKE_CUDA_API int fake_cuda_set_multiprocessors(int count) {
  using Properties = cudaDeviceProp* (*)(signed char device);
  void* const torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  const auto properties_of =
      reinterpret_cast<Properties>(dlsym(torch, "_ZN2at4cuda19getDevicePropertiesEa"));
  for (int device = 0; device < settings().devices; ++device)
    properties_of(static_cast<signed char>(device))->multiProcessorCount = count;
  return std::exchange(settings().multiprocessors, count);
}

FAKE_CUDA_API void fake_cuda_record(bool on) {
  FAKE_CUDA_LOCK;
  is_recording = on;
  if (on) recorded.clear();
}

// Forgets the fault of an operation. On a GPU, a fault lasts to the end of the process.
FAKE_CUDA_API void fake_cuda_forget_fault() {
  FAKE_CUDA_LOCK;
  run_all();
  last_error = lost_context = cudaSuccess;
}

// A line for each recorded call: its kind, a tab, and its text.
FAKE_CUDA_API const char* fake_cuda_recorded() { return recorded.c_str(); }

CUDA(cudaGetDeviceCount)(int* count) {
  load_fallback();
  *count = settings().devices;
  return cudaSuccess;
}

CUDA(cudaGetDevice)(int* device) {
  *device = current_device;
  return cudaSuccess;
}

CUDA(cudaSetDevice)(int device) {
  if (device < 0 || device >= settings().devices) return done(cudaErrorInvalidDevice);
  current_device = device;
  has_context = true;
  return cudaSuccess;
}

CUDA(cudaGetDeviceProperties)(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= settings().devices) return done(cudaErrorInvalidDevice);
  *properties = {};
  strcpy(properties->name, "fake CUDA device");
  properties->totalGlobalMem = settings().memory;
  properties->major = settings().capability / 10;
  properties->minor = settings().capability % 10;
  properties->multiProcessorCount = settings().multiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] =
      1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = INT32_MAX;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = most_shared() < 128 << 10 ? 1536 : 2048;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = kMostSharedUnasked;
  properties->sharedMemPerBlockOptin = most_shared();
  properties->sharedMemPerMultiprocessor = most_shared() + 1024;
  properties->l2CacheSize = 50 << 20;
  properties->unifiedAddressing = properties->canMapHostMemory = 1;
  return cudaSuccess;
}

CUDA(cudaDeviceGetAttribute)(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  FAKE_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = kMostSharedUnasked; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = most_shared(); break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = most_shared() + (1 << 10); break;
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate:
    case cudaDevAttrGlobalMemoryBusWidth: *value = 0; break;  // nothing here has a speed
    default: return refuse(cudaErrorNotSupported, "attribute %d of a device", attribute);
  }
  return cudaSuccess;
}

CUDA(cudaDeviceGetPCIBusId)(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}

CUDA(cudaDeviceCanAccessPeer)(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

CUDA(cudaDeviceGetStreamPriorityRange)(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

CUDA(cudaDriverGetVersion)(int* version) {
  *version = settings().driver;
  return cudaSuccess;
}

CUDA(cudaRuntimeGetVersion)(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

CUDA(cudaProfilerStart)() { return cudaSuccess; }
CUDA(cudaProfilerStop)() { return cudaSuccess; }

CUDA(cudaGetLastError)() {
  const cudaError_t error = last_error;
  last_error = lost_context;
  return error;
}

CUDA(cudaPeekAtLastError)() { return last_error; }

FAKE_CUDA_API const char* cudaGetErrorName(cudaError_t error) {
  return cudas_text(error, "cudaGetErrorName");
}

FAKE_CUDA_API const char* cudaGetErrorString(cudaError_t error) {
  const char* const words = cudas_text(error, "cudaGetErrorString");
  if (error != explained) return words;
  thread_local char text[2 * kText];
  snprintf(text, sizeof text, "%s (fake cuda: %s)", words, reason);
  return text;
}

CUDA(cudaGetDriverEntryPointByVersion)(const char* symbol, void** function, unsigned,
                                       unsigned long long,
                                       cudaDriverEntryPointQueryResult* status) {
  *function = dlsym(RTLD_DEFAULT, symbol);
  if (status)
    *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

CUDA_DRIVER(cuDevicePrimaryCtxGetState)(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
