// How the probes are launched.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace amp_ext {

struct Grid {
  int blocks;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;
};

template <class... Params, class... Args>
int launch(const Grid& grid, void (*kernel)(Params...), const Args&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace amp_ext
