// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "amp_ext/backend.h"
#include "memo.h"

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

// A kernel on a device, in clusters of so many blocks.
struct KernelKey {
  const void* kernel;
  int device;
  int cluster = 1;

  bool operator==(const KernelKey&) const = default;
  size_t hash() const {
    return hash_of({reinterpret_cast<uintptr_t>(kernel), static_cast<uint64_t>(device),
                    static_cast<uint64_t>(cluster)});
  }
};

// Whether the code that runs on the current device has ptx::wait_for_previous_grid: if its PTX is
// of version 9.0 or more, which that of a driver's own compilation need not be on a later GPU.
// Asked once a thread.
inline bool waits_for_previous_grid(const void* kernel) {
  constexpr int kSince = 90;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  thread_local Memo<KernelKey, bool, 512> known;
  const bool* const waits = known.of({kernel, device}, [](const KernelKey& key) {
    cudaFuncAttributes code{};
    const bool is_known = cudaFuncGetAttributes(&code, key.kernel) == cudaSuccess;
    return is_known ? std::optional(code.ptxVersion >= kSince) : std::nullopt;
  });
  return waits && *waits;
}

// Whether blocks may begin before the grid before has ended. Not in a capture, whose graph would
// have edges that not all who read it know.
inline bool may_begin_early(const void* kernel, cudaStream_t stream) {
  if (!waits_for_previous_grid(kernel)) return false;
  cudaStreamCaptureStatus status;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess)
    return status == cudaStreamCaptureStatusNone;
  (void)cudaGetLastError();  // the launch has its own
  return false;
}

// A launch in clusters of `cluster` blocks. The attributes, of which there is room for one more,
// are the caller's.
inline cudaLaunchConfig_t cluster_config(int blocks, int cluster, int threads, size_t shared_bytes,
                                         cudaLaunchAttribute (&attributes)[2]) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = attributes;
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  return config;
}

// How many such clusters run at once on the current device, with kBytes of shared memory a block; 0
// where the runtime does not say. Asked once a thread.
template <auto kKernel, int kBytes>
int active_clusters(int cluster, int threads) {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  thread_local Memo<KernelKey, int, 16> known;
  const auto* const kernel = reinterpret_cast<const void*>(kKernel);
  return *known.of({kernel, device, cluster}, [threads](const KernelKey& key) {
    cudaLaunchAttribute attributes[2] = {};
    const auto config = cluster_config(key.cluster, key.cluster, threads, kBytes, attributes);
    int clusters = 0;
    if (allow_shared_bytes<kKernel, kBytes>() == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&clusters, key.kernel, &config) == cudaSuccess)
      return std::optional(clusters);
    (void)cudaGetLastError();
    return std::optional(0);
  });
}

// Whether the driver launches kernels with more than 4 KiB of parameters: since CUDA 12.1.
inline bool takes_long_parameters() {
  constexpr int kSince = 12010;
  static const bool takes = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= kSince;
  }();
  return takes;
}

// In clusters of `cluster` blocks.
template <class... Params, class... Args>
Status launch_clusters(void (*kernel)(Params...), int blocks, int cluster, int threads,
                       size_t shared_bytes, cuda::Stream stream, const Args&... args) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = cluster_config(blocks, cluster, threads, shared_bytes, attributes);
  config.stream = static_cast<cudaStream_t>(stream);
  if (may_begin_early(reinterpret_cast<const void*>(kernel), config.stream)) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess ? Status::ok
                                                                     : Status::launch_failed;
}

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), int blocks, int threads, size_t shared_bytes,
              cuda::Stream stream, const Args&... args) {
  return launch_clusters(kernel, blocks, 1, threads, shared_bytes, stream, args...);
}

}  // namespace amp_ext
