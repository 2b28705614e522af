// Launches kernels.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <utility>

#include "amp_ext/backend.h"

namespace amp_ext {

// Allows blocks of a kernel kBytes of dynamic shared memory on the current device. The function
// remembers the devices it has set.
template <auto kKernel, int kBytes>
cudaError_t allow_shared_bytes() {
  static std::atomic<uint64_t> told = 0;  // one bit for each of the first 64 devices
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (told & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) told |= bit;
  return error;
}

// Returns whether the kernel's code on the current device has ptx::wait_for_previous_grid. The code
// has it if its PTX version is 9.0 or later; on later GPUs the driver may have compiled older PTX.
// Each thread queries a kernel once.
inline bool waits_for_previous_grid(const void* kernel) {
  constexpr int kSince = 90;
  thread_local std::map<std::pair<const void*, int>, bool> known;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const auto found = known.find({kernel, device});
  if (found != known.end()) return found->second;
  cudaFuncAttributes code{};
  if (cudaFuncGetAttributes(&code, kernel) != cudaSuccess) return false;
  return known[{kernel, device}] = code.ptxVersion >= kSince;
}

// Returns whether blocks may begin before the previous grid ends (programmatic dependent launch).
// The result is false during capture, since not all readers of a graph understand such edges.
inline bool may_begin_early(const void* kernel, cudaStream_t stream) {
  if (!waits_for_previous_grid(kernel)) return false;
  cudaStreamCaptureStatus status;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess)
    return status == cudaStreamCaptureStatusNone;
  (void)cudaGetLastError();  // the launch reports its own error
  return false;
}

// Returns whether the driver accepts more than 4 KiB of kernel parameters (CUDA 12.1 or later).
inline bool takes_long_parameters() {
  constexpr int kSince = 12010;
  static const bool takes = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= kSince;
  }();
  return takes;
}

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), int blocks, int threads, size_t shared_bytes,
              cuda::Stream stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = may_begin_early(reinterpret_cast<const void*>(kernel), config.stream);
  return cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess ? Status::ok
                                                                     : Status::launch_failed;
}

}  // namespace amp_ext
