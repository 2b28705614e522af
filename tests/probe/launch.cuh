// How the probes are launched.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace amp_ext {

struct Grid {
  int blocks;
  int threads;
  size_t shared_bytes = 0;
  bool early = false;  // it need not wait for the grid before
};

template <class... Params, class... Args>
int launch(const Grid& grid, void (*kernel)(Params...), const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.attrs = &early;
  config.numAttrs = grid.early;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace amp_ext
