// Launches: checked as the driver would, and run by the library of kernels.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <optional>
#include <unordered_map>

#include "kernels.h"
#include "runtime.h"

namespace fake_cuda {
namespace {

constexpr unsigned kMostBlocksAcross = 65535;  // along y, and z
constexpr unsigned kMostThreads = 1024, kMostThreadsDeep = 64;
constexpr size_t kFewParameters = 4 << 10;  // bytes, that a driver for CUDA 12.0 takes
constexpr int kManyParameters = 12010;
constexpr int kWaits = 90;  // PTX of this version has griddepcontrol.wait

struct Function {
  const char* symbol;
  const void* binary;              // with its code
  int ptx = 0;                     // the version of the PTX it was compiled from
  const Kernel* kernel = nullptr;  // null if it is not one of ours
  bool is_known = false;
  std::vector<size_t> most_shared;  // bytes of a block, on each device
};

bool drops = false, refuses_tensor_maps = false;
std::optional<uint64_t> schedule;  // the seed of each later launch
int64_t early_launches = 0;
thread_local std::vector<cudaLaunchConfig_t> pushed;  // by <<<...>>>

std::unordered_map<const void*, Function>& functions() {
  static auto* const all = new std::unordered_map<const void*, Function>;  // for static objects
  return *all;
}

template <class T>
T read(const char* from) {
  T value;
  memcpy(&value, from, sizeof value);
  return value;
}

// The version of PTX from which a binary has code for the devices: machine code of their own
// generation, or else the PTX itself, both the newest. 0 if there is neither.
int ptx_version(const void* binary) {
  constexpr int kHeader = 16, kPtx = 1, kCode = 2;
  const char* at = read<const char*>(static_cast<const char*>(binary) + 8);
  const char* const end = at + kHeader + read<uint64_t>(at + 8);
  int newest[kCode + 1] = {};
  for (at += kHeader; at < end; at += read<uint32_t>(at + 4) + read<uint64_t>(at + 8)) {
    const int kind = read<uint16_t>(at), version = read<uint32_t>(at + 28);
    const bool runs = version <= settings().capability &&
                      (kind == kPtx || version / 10 == settings().capability / 10);
    if (runs && kind <= kCode) newest[kind] = std::max(newest[kind], version);
  }
  return newest[kCode] ? newest[kCode] : newest[kPtx];
}

Function* find_function(const void* pointer) {
  const auto found = functions().find(pointer);
  if (found == functions().end()) return nullptr;
  Function& function = found->second;
  if (!function.is_known) {
    function.is_known = true;
    function.kernel = kernels().find(function.symbol);
    function.ptx = ptx_version(function.binary);
    function.most_shared.assign(settings().devices, kMostSharedUnasked);
  }
  return &function;
}

// The reason for which the driver would refuse a launch, or nothing.
const char* refusal(const cudaLaunchConfig_t& config, const Function& function, bool captured) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > INT32_MAX ||
      std::max(grid.y, grid.z) > kMostBlocksAcross)
    return "its grid";
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMostThreads || block.z > kMostThreadsDeep) return "its block";
  if (config.dynamicSmemBytes > function.most_shared[current_device])
    return "more shared memory than it may have";
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id != cudaLaunchAttributeProgrammaticStreamSerialization)
      return "an unknown attribute";
    if (function.ptx < kWaits) return "that it begins early, which its code does not know";
    if (captured) return "that it begins early, in a capture";
  }
  return nullptr;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* pointer, void** parameters) {
  Function* const function = find_function(pointer);
  if (!function)
    return refuse(cudaErrorInvalidDeviceFunction, "a launch of %p, no kernel", pointer);
  if (!function->kernel) return refuse(cudaErrorNotSupported, "no PTX of %s", function->symbol);
  const std::string& name = function->kernel->name;
  Stream* const stream = find_stream(config.stream);
  if (!stream || stream->device != current_device)
    return refuse(cudaErrorInvalidResourceHandle, "%s: no stream of device %d", name.c_str(),
                  current_device);
  if (const char* why = refusal(config, *function, stream->capture != nullptr))
    return refuse(cudaErrorInvalidConfiguration, "%s: %s", name.c_str(), why);
  const auto& bytes = function->kernel->parameters;
  if (settings().driver < kManyParameters &&
      std::accumulate(bytes.begin(), bytes.end(), size_t{0}) > kFewParameters)
    return refuse(cudaErrorInvalidConfiguration, "%s: its bytes of parameters", name.c_str());
  has_context = true;
  early_launches += config.numAttrs > 0;  // of another attribute, the launch is refused
  std::vector<std::vector<char>> copies;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const char* const from = static_cast<const char*>(parameters[i]);
    copies.emplace_back(from, from + bytes[i]);
  }
  return enqueue(*stream, "launch", name,
                 [config = config, device = current_device,
                  attributes = std::vector(config.attrs, config.attrs + config.numAttrs),
                  kernel = function->kernel, seed = schedule.value_or(settings().generator()),
                  copies = std::move(copies)]() mutable {
                   const Access access(device);
                   config.attrs = attributes.data();
                   std::vector<void*> pointers;
                   for (auto& copy : copies) pointers.push_back(copy.data());
                   const char* fault = kernels().launch(config, *kernel, pointers.data(), seed);
                   if (*fault) lose_context("%s: %s", kernel->name.c_str(), fault);
                 });
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& instance = []() -> const Kernels& {
    const char* const path = getenv("FAKE_CUDA_KERNELS");
    void* const library = dlopen(path ? path : "", RTLD_NOW | RTLD_LOCAL);
    void* const get = library ? dlsym(library, "fake_cuda_kernels") : nullptr;
    if (!get) {
      fprintf(stderr, "fake cuda: FAKE_CUDA_KERNELS: %s\n", dlerror());
      abort();
    }
    return *reinterpret_cast<const Kernels* (*)()>(get)();
  }();
  return instance;
}

// For torch's operators: `run` as an operation on the stream.
__attribute__((visibility("default"))) cudaError_t launch_on_host(cudaStream_t handle,
                                                                  const std::string& name,
                                                                  std::function<void()> run) {
  FAKE_CUDA_LOCK;
  Stream* const stream = find_stream(handle);
  if (!stream || stream->device != current_device)
    return refuse(cudaErrorInvalidResourceHandle, "%s: no stream of device %d", name.c_str(),
                  current_device);
  return enqueue(*stream, "launch", name, [name, device = current_device, run = std::move(run)] {
    const Access access(device);
    try {
      run();
    } catch (const std::exception& error) {
      lose_context("%s: %s", name.c_str(), error.what());
    }
  });
}

}  // namespace fake_cuda

using namespace fake_cuda;

// Drops later launches, at no cost.
FAKE_CUDA_API void fake_cuda_drop_launches(bool drop) { drops = drop; }

// Gives each later launch the schedule of a seed, or again one of its own.
FAKE_CUDA_API void fake_cuda_pin_schedule(bool pin, uint64_t seed) {
  FAKE_CUDA_LOCK;
  schedule.reset();
  if (pin) schedule = seed;
}

FAKE_CUDA_API void fake_cuda_refuse_tensor_maps(bool refuse) { refuses_tensor_maps = refuse; }

// Returns the number of launches so far with programmatic stream serialization.
FAKE_CUDA_API int64_t fake_cuda_early_launches() { return early_launches; }

FAKE_CUDA_API void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
FAKE_CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
FAKE_CUDA_API void __cudaUnregisterFatBinary(void**) {}
FAKE_CUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
FAKE_CUDA_API char __cudaInitModule(void**) { return 1; }

FAKE_CUDA_API void __cudaRegisterFunction(void** binary, const char* pointer, char*,
                                          const char* symbol, int, uint3*, uint3*, dim3*, dim3*,
                                          int*) {
  functions()[pointer] = {symbol, binary};
}

FAKE_CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                                   void* stream) {
  pushed.push_back({grid, block, shared, static_cast<cudaStream_t>(stream), nullptr, 0});
  return 0;
}

CUDA(__cudaPopCallConfiguration)(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (pushed.empty()) return done(cudaErrorMissingConfiguration);
  *grid = pushed.back().gridDim;
  *block = pushed.back().blockDim;
  *shared = pushed.back().dynamicSmemBytes;
  *static_cast<cudaStream_t*>(stream) = pushed.back().stream;
  pushed.pop_back();
  return cudaSuccess;
}

CUDA(__cudaGetKernel)(cudaKernel_t* kernel, const void* pointer) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(pointer));
  return cudaSuccess;
}

CUDA(cudaLaunchKernel)(const void* pointer, dim3 grid, dim3 block, void** parameters, size_t shared,
                       cudaStream_t stream) {
  FAKE_CUDA_LOCK;
  return launch({grid, block, shared, stream, nullptr, 0}, pointer, parameters);
}

CUDA(__cudaLaunchKernel)(cudaKernel_t kernel, dim3 grid, dim3 block, void** parameters,
                         size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, parameters, shared, stream);
}

CUDA(cudaLaunchKernelExC)(const cudaLaunchConfig_t* config, const void* pointer,
                          void** parameters) {
  if (drops) return cudaSuccess;
  FAKE_CUDA_LOCK;
  return launch(*config, pointer, parameters);
}

CUDA(cudaFuncGetAttributes)(cudaFuncAttributes* attributes, const void* pointer) {
  FAKE_CUDA_LOCK;
  const Function* const function = find_function(pointer);
  if (!function) return refuse(cudaErrorInvalidDeviceFunction, "%p is no kernel", pointer);
  has_context = true;
  *attributes = {};
  attributes->ptxVersion = function->ptx;
  attributes->binaryVersion = settings().capability;
  return cudaSuccess;
}

CUDA(cudaFuncSetAttribute)(const void* pointer, cudaFuncAttribute attribute, int value) {
  FAKE_CUDA_LOCK;
  Function* const function = find_function(pointer);
  if (!function) return refuse(cudaErrorInvalidDeviceFunction, "%p is no kernel", pointer);
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<size_t>(value) > most_shared())
    return refuse(cudaErrorInvalidValue, "attribute %d of a kernel: %d", attribute, value);
  has_context = true;
  function->most_shared[current_device] = value;
  return cudaSuccess;
}

// ---- the driver, as Triton loads and launches compiled kernels ----------------------------------

// A launch is recorded and computes nothing: the runtime does not execute machine code.
struct CUfunc_st {
  std::string name;
};

CUDA_DRIVER(cuGetErrorString)(CUresult, const char** text) {
  *text = "an error of the fake driver";
  return CUDA_SUCCESS;
}

CUDA_DRIVER(cuDeviceGet)(CUdevice* device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

CUDA_DRIVER(cuDeviceGetAttribute)(int* value, CUdevice_attribute attribute, CUdevice device) {
  const auto same = static_cast<cudaDeviceAttr>(attribute);  // their numbers are equal
  return cudaDeviceGetAttribute(value, same, device) == cudaSuccess ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_INVALID_VALUE;
}

CUDA_DRIVER(cuCtxGetCurrent)(CUcontext* context) {
  static char only;
  *context = reinterpret_cast<CUcontext>(&only);
  return CUDA_SUCCESS;
}

CUDA_DRIVER(cuPointerGetAttribute)(void* value, CUpointer_attribute attribute,
                                   CUdeviceptr pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER ||
      device_of(reinterpret_cast<const void*>(pointer)) < 0)
    return CUDA_ERROR_INVALID_VALUE;
  *static_cast<CUdeviceptr*>(value) = pointer;
  return CUDA_SUCCESS;
}

CUDA_DRIVER(cuModuleLoadData)(CUmodule* module, const void*) {
  FAKE_CUDA_LOCK;
  if (check_captures("cuModuleLoadData") != cudaSuccess)
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  *module = nullptr;  // a function is known by its name alone
  return CUDA_SUCCESS;
}

CUDA_DRIVER(cuModuleGetFunction)(CUfunction* function, CUmodule, const char* name) {
  *function = new CUfunc_st{name};
  return CUDA_SUCCESS;
}

CUDA_DRIVER(cuFuncGetAttribute)(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUDA_DRIVER(cuFuncSetAttribute)(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }

CUDA_DRIVER(cuFuncSetCacheConfig)(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

CUDA_DRIVER(cuTensorMapEncodeTiled)(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                    void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                                    const cuuint32_t* box, const cuuint32_t* steps,
                                    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                    CUtensorMapL2promotion promotion,
                                    CUtensorMapFloatOOBfill fill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  if (refuses_tensor_maps) return CUDA_ERROR_INVALID_VALUE;
  const auto encode =
      reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(kernels().encode_tensor_map);
  return encode(map, type, rank, base, sizes, strides, box, steps, interleave, swizzle, promotion,
                fill);
}

CUDA_DRIVER(cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  FAKE_CUDA_LOCK;
  Stream* const stream = find_stream(config->hStream);
  if (!stream || stream->device != current_device) return CUDA_ERROR_INVALID_HANDLE;
  enqueue(*stream, "launch", function->name, [] {});
  return CUDA_SUCCESS;
}
