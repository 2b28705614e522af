// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "amp_ext/backend.h"

namespace amp_ext {

// Lets blocks of a kernel have so much shared memory on the current device. Which devices have been
// told is kept.
template <auto kKernel, int kBytes>
cudaError_t allow_shared_bytes() {
  static std::atomic<uint64_t> told = 0;  // a bit for each of the first devices
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (told & bit) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error == cudaSuccess) told |= bit;
  return error;
}

// In clusters of `cluster` blocks.
template <class... Params, class... Args>
Status launch_clusters(void (*kernel)(Params...), int blocks, int cluster, int threads,
                       size_t shared_bytes, cuda::Stream stream, const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess ? Status::ok
                                                                     : Status::launch_failed;
}

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), int blocks, int threads, size_t shared_bytes,
              cuda::Stream stream, const Args&... args) {
  return launch_clusters(kernel, blocks, 1, threads, shared_bytes, stream, args...);
}

}  // namespace amp_ext
