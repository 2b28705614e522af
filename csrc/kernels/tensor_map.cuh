// Tensor maps for TMA, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "memo.h"

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

// All that a tensor map says.
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

// Describes a tensor of `sizes` elements x, y, z, x the contiguous one, with bytes from y to y + 1
// and from z to z + 1, of which TMA moves one `box` at a time. The base is aligned to 16 bytes, and
// strides and a box's row are multiples of 16; a row has at most the bytes of the swizzle.
// The driver is asked unless this thread has the answer.
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
