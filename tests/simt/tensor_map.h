// What the executor keeps in a CUtensorMap.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace simt {

constexpr int kRank = 3;

struct TensorMap {
  uint64_t magic;
  unsigned char* base;
  uint64_t size[kRank];    // in elements, the contiguous dimension first
  uint64_t stride[kRank];  // in bytes
  uint32_t box[kRank];     // in elements
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  int element_bytes;

  size_t row_bytes() const { return static_cast<size_t>(box[0]) * element_bytes; }
  size_t box_bytes() const { return row_bytes() * box[1] * box[2]; }
};

static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

// Fails if cuTensorMapEncodeTiled has not made it.
const TensorMap& tensor_map(const char* operation, const CUtensorMap& map);

// Bytes of a row within which chunks of 16 bytes change places.
size_t swizzle_span(CUtensorMapSwizzle swizzle);

}  // namespace simt
