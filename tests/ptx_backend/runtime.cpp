// Implement the launchers' part of the CUDA runtime over the executor of PTX. There is one device
// with the host's memory, and launches end before they return.
#include "runtime.h"

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <unordered_map>
#include <utility>

#include "kernels.h"
#include "memory/fresh.h"
#include "threads/machine.h"

extern "C" const fake_cuda::Kernels* fake_cuda_kernels();
extern "C" void cudasim_allow(cudasim::FindAllocation);
extern "C" const cudasim::Statistics* cudasim_statistics();

namespace ptx_backend {

Counters counters;
std::string fault;
uint64_t next_seed = 0;
bool refuse_tensor_maps = false;

namespace {

using cudasim::Range;

constexpr int kDriverVersion = 13000;

// The beginnings of ranges by their ends.
std::map<uint64_t, uint64_t> ranges;

uint64_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

Range find_range(uint64_t address) {
  const auto found = ranges.upper_bound(address);
  if (found == ranges.end() || address < found->second) return {};
  return {found->second, found->first};
}

std::unordered_map<const void*, std::string>& symbols() {
  static auto& all = *new std::unordered_map<const void*, std::string>;
  return all;
}

cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error, const std::string& why) {
  fault = why;
  return last_error = error;
}

// Has the executor read the PTX beside its library.
bool set_folder() {
  Dl_info executor{};
  dladdr(reinterpret_cast<const void*>(&fake_cuda_kernels), &executor);
  const std::string path = executor.dli_fname;
  return setenv("CUDASIM_PTX", path.substr(0, path.rfind('/')).c_str(), /*overwrite=*/1) == 0;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* pointer, void** parameters) {
  fault.clear();
  static const bool is_set = set_folder();
  (void)is_set;
  const auto symbol = symbols().find(pointer);
  const auto* const kernel =
      symbol == symbols().end() ? nullptr : fake_cuda_kernels()->find(symbol->second.c_str());
  if (!kernel) return fail(cudaErrorInvalidDeviceFunction, "there is no PTX of the kernel");
  const dim3 grid = config.gridDim;
  const int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  if (blocks == 0) return fail(cudaErrorInvalidConfiguration, "a launch of no blocks");
  ++counters.launches;
  counters.blocks += blocks;
  for (const size_t bytes : kernel->parameters) counters.parameter_bytes += bytes;
  cudasim_allow(find_range);
  const std::string report = fake_cuda_kernels()->launch(config, *kernel, parameters, next_seed++);
  return report.empty() ? cudaSuccess : fail(cudaErrorLaunchFailure, report);
}

template <class... Args>
CUresult encode_or_refuse(Args... args) {
  if (refuse_tensor_maps) return CUDA_ERROR_INVALID_VALUE;
  void* const encode = fake_cuda_kernels()->encode_tensor_map;
  return reinterpret_cast<CUresult (*)(Args...)>(encode)(args...);
}

}  // namespace

void forget_memory() { ranges.clear(); }

void allow_memory(const void* data, int64_t bytes) {
  if (!data || bytes <= 0) return;
  uint64_t begin = number(data), end = begin + static_cast<uint64_t>(bytes);
  auto other = ranges.upper_bound(begin);
  while (other != ranges.end() && other->second < end) {  // they overlap
    begin = std::min(begin, other->second), end = std::max(end, other->first);
    other = ranges.erase(other);
  }
  ranges[end] = begin;
}

void* fresh_memory(void* begin, int64_t bytes) {
  cudasim::fill_fresh(begin, static_cast<size_t>(bytes));
  allow_memory(begin, bytes);
  return begin;
}

}  // namespace ptx_backend

using namespace ptx_backend;

extern "C" {

// ---- for Python ---------------------------------------------------------------------------------

void ptx_counters(Counters* result) {
  const cudasim::Statistics& of_executor = *cudasim_statistics();
  *result = counters;
  result->bytes_loaded = static_cast<int64_t>(of_executor.bytes_loaded);
  result->bytes_stored = static_cast<int64_t>(of_executor.bytes_stored);
  result->bytes_copied = static_cast<int64_t>(of_executor.bytes_copied);
  result->most_loads = static_cast<int64_t>(of_executor.most_loads);
}

// The fault of the last launch; empty if it had none.
const char* ptx_report() { return fault.c_str(); }

// Later launches may access only the memory named by ptx_allow, in schedules by this seed.
void ptx_start(uint64_t seed) {
  next_seed = seed;
  forget_memory();
}

void ptx_allow(const void* begin, int64_t bytes) { allow_memory(begin, bytes); }

// ---- calls of nvcc's code -----------------------------------------------------------------------

void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* pointer, char*, const char* symbol, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  symbols()[pointer] = symbol;
}

// Launches are cudaLaunchKernelEx's.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return cudaErrorNotSupported; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }

// ---- calls of launchers -------------------------------------------------------------------------

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** parameters) {
  return launch(*config, kernel, parameters);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t) { return fault.c_str(); }

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion = PTX_CAPABILITY;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kDriverVersion;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  const decltype(&cuTensorMapEncodeTiled) encode = encode_or_refuse;
  *function = reinterpret_cast<void*>(encode);
  *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
