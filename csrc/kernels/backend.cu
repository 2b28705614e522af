#include <cuda_runtime.h>

#include "backend.h"

namespace amp_ext {

const char* cuda::CudaBackend::last_error() const {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace amp_ext
