// Encodes tensor maps for TMA on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "memo.h"

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

// The contents of a tensor map.
struct TensorMapKey {
  CUtensorMapDataType type;
  void* base;
  std::array<uint64_t, 3> sizes;
  std::array<uint64_t, 2> byte_strides;
  std::array<uint32_t, 3> box;
  CUtensorMapSwizzle swizzle;

  bool operator==(const TensorMapKey&) const = default;
  size_t hash() const {
    return hash_of(
        {reinterpret_cast<uintptr_t>(base), sizes[0], sizes[1], byte_strides[0], box[1]});
  }
};

// Encodes a tensor of `sizes` elements x, y, z with x contiguous, moved by TMA in units of `box`.
// The byte strides separate neighbours in y and in z. The base is aligned to 16 bytes; strides and
// a box's row are multiples of 16, and a row is at most as long as the swizzle. Each thread caches
// the driver's results.
inline cudaError_t encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, void* base,
                                     const uint64_t (&sizes)[3], const uint64_t (&byte_strides)[2],
                                     const uint32_t (&box)[3], CUtensorMapSwizzle swizzle) {
  static const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto ask = [](const TensorMapKey& t) -> std::optional<CUtensorMap> {
    constexpr uint32_t kEveryElement[3] = {1, 1, 1};
    CUtensorMap made;
    const CUresult result =
        encode(&made, t.type, 3, t.base, t.sizes.data(), t.byte_strides.data(), t.box.data(),
               kEveryElement, CU_TENSOR_MAP_INTERLEAVE_NONE, t.swizzle,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? std::optional(made) : std::nullopt;
  };
  thread_local Memo<TensorMapKey, CUtensorMap, 1024> known;
  const CUtensorMap* const found = known.of(
      {type, base, std::to_array(sizes), std::to_array(byte_strides), std::to_array(box), swizzle},
      ask);
  if (!found) return cudaErrorInvalidValue;
  *map = *found;
  return cudaSuccess;
}

}  // namespace amp_ext
