// How kernels are launched.
#pragma once

#include <cuda_runtime.h>

#include "amp_ext/launch.h"

namespace amp_ext {

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), int blocks, int threads, size_t shared_bytes,
              cuda::Stream stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess ? Status::ok
                                                                     : Status::launch_failed;
}

}  // namespace amp_ext
