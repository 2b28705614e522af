// Tensor maps for TMA, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace amp_ext {

// The driver's encoder, looked up so that nothing links to the driver; null where it has none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  constexpr unsigned kSince = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult status;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                       cudaEnableDefault, &status) != cudaSuccess) {
    cudaGetLastError();  // it is told by what encode_tensor_map returns
    return nullptr;
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// Describes a tensor of `sizes` elements x, y, z, x the contiguous one, with bytes from y to y + 1
// and from z to z + 1, of which TMA moves one `box` at a time. The base is aligned to 16 bytes, and
// strides and a box's row are multiples of 16; a row has at most the bytes of the swizzle.
inline cudaError_t encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, void* base,
                                     const uint64_t (&sizes)[3], const uint64_t (&byte_strides)[2],
                                     const uint32_t (&box)[3], CUtensorMapSwizzle swizzle) {
  static const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr uint32_t kEveryElement[3] = {1, 1, 1};
  const CUresult result = encode(
      map, type, 3, base, sizes, byte_strides, box, kEveryElement, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace amp_ext
