// A launch that CUDA may refuse, for tests/backends/test_cuda_runtime.py.
#include <cuda_runtime.h>

namespace {

__global__ void probe_kernel(int* to) { *to = 1; }

}  // namespace

// Returns the error of the launch.
extern "C" int launch(const unsigned* grid, const unsigned* block, size_t shared, unsigned cluster,
                      void* stream, int* to) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid[0], grid[1], grid[2]);
  config.blockDim = dim3(block[0], block[1], block[2]);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = cluster ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, probe_kernel, to);
  (void)cudaGetLastError();
  return error;
}

extern "C" int allow_shared_memory(int bytes) {
  const cudaError_t error =
      cudaFuncSetAttribute(probe_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  (void)cudaGetLastError();
  return error;
}
