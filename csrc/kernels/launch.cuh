// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include "amp_ext/backend.h"

namespace amp_ext {

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
