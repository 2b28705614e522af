// Encodes tensor maps for TMA on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace amp_ext {

// Looks up the driver's encoder without linking to the driver; null if there is none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  constexpr unsigned kSince = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult status;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                       cudaEnableDefault, &status) != cudaSuccess) {
    cudaGetLastError();  // encode_tensor_map reports the failure
    return nullptr;
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// Encodes a tensor of `sizes` elements x, y, z with x contiguous, moved by TMA in units of `box`.
// The byte strides separate neighbours in y and in z. The base is aligned to 16 bytes; strides and
// a box's row are multiples of 16, and a row is at most as long as the swizzle.
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
