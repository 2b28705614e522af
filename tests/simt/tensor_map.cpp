#include "tensor_map.h"

#include <cstring>
#include <iterator>
#include <string>

#include "engine.h"

namespace simt {
namespace {

constexpr uint64_t kMagic = 0x70616d20726f736e;
constexpr uint64_t kMostElements = 1ull << 32;  // of a dimension
constexpr uint64_t kMostStride = 1ull << 40;    // below this, in bytes
constexpr uint32_t kMostBox = 256;
constexpr size_t kChunkBytes = 16;
constexpr size_t kMapAlignment = 64;

bool is_aligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// In the order of CUtensorMapDataType; the types behind these are not modelled.
constexpr int kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};

std::string refusal(const TensorMap& map) {
  if (!map.base || !is_aligned(map.base, kChunkBytes))
    return text("the tensor's address %p is not aligned to 16 bytes", map.base);
  for (int i = 0; i < kRank; ++i) {
    if (map.size[i] == 0 || map.size[i] > kMostElements)
      return text("dimension %d has %lu elements, not 1 to 2^32", i, map.size[i]);
    if (map.box[i] == 0 || map.box[i] > kMostBox)
      return text("the box has %u elements in dimension %d, not 1 to 256", map.box[i], i);
    if (i > 0 && (map.stride[i] % kChunkBytes != 0 || map.stride[i] >= kMostStride))
      return text("dimension %d has a stride of %lu bytes, not a multiple of 16 below 2^40", i,
                  map.stride[i]);
  }
  if (map.row_bytes() % kChunkBytes != 0)
    return text("the box's rows have %zu bytes, not a multiple of 16", map.row_bytes());
  if (const size_t span = swizzle_span(map.swizzle); span && map.row_bytes() > span)
    return text("the box's rows have %zu bytes, the swizzle spans %zu", map.row_bytes(), span);
  return "";
}

}  // namespace

size_t swizzle_span(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_32B: return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B: return 128;
    default: return 0;
  }
}

const TensorMap& tensor_map(const char* operation, const CUtensorMap& map) {
  const auto& result = reinterpret_cast<const TensorMap&>(map);
  if (!is_aligned(&map, kMapAlignment))
    fail("%s: the tensor map is not aligned to 64 bytes", operation);
  if (result.magic != kMagic) fail("%s: not a tensor map", operation);
  return result;
}

}  // namespace simt

CUresult cuTensorMapEncodeTiled(CUtensorMap* result, CUtensorMapDataType type, cuuint32_t rank,
                                void* base, const cuuint64_t* size, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  using namespace simt;
  const auto refuse = [](const std::string& reason) {
    clear_fault();
    set_fault("cuTensorMapEncodeTiled: " + reason);
    return CUDA_ERROR_INVALID_VALUE;
  };
  if (!is_aligned(result, kMapAlignment)) return refuse("the map is not aligned to 64 bytes");
  if (rank != kRank) return refuse(text("rank %u, the executor has %d alone", rank, kRank));
  if (type < 0 || type >= std::size(kElementBytes))
    return refuse(text("data type %d, which the executor does not have", type));
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      swizzle > CU_TENSOR_MAP_SWIZZLE_128B)
    return refuse("an interleave, fill or swizzle that the executor does not have");
  TensorMap map{};
  map.magic = kMagic;
  map.base = static_cast<unsigned char*>(base);
  map.type = type;
  map.swizzle = swizzle;
  map.element_bytes = kElementBytes[type];
  for (int i = 0; i < kRank; ++i) {
    if (element_strides[i] != 1) return refuse("an element stride other than 1");
    map.size[i] = size[i];
    map.stride[i] = i == 0 ? map.element_bytes : strides[i - 1];
    map.box[i] = box[i];
  }
  if (const std::string reason = refusal(map); !reason.empty()) return refuse(reason);
  memset(result, 0, sizeof(*result));
  memcpy(result, &map, sizeof(map));
  return CUDA_SUCCESS;
}
