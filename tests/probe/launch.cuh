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
  bool early = false;  // it need not wait for the grid before
};

template <class... Params, class... Args>
int launch(const Grid& grid, void (*kernel)(Params...), const Args&... args) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.attrs = attributes;
  config.numAttrs = grid.early ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace amp_ext
