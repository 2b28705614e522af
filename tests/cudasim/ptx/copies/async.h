// Share mbarriers and tensor maps between asynchronous copies and their waits.
#pragma once

#include "memory/memory.h"

namespace cudasim {

// ---- mbarriers ----------------------------------------------------------------------------------

// Faults if no mbarrier that the async proxy can see is at an offset of a block's shared memory.
void check_mbarrier(Block& block, u32 offset);
// The engine of copies that complete on an mbarrier; a phase is a time of it.
Role role_of_mbarrier(Block& block, u32 offset, bool writes);
void complete_bytes(Block& block, u32 offset, u32 bytes);

// ---- tensor maps --------------------------------------------------------------------------------

// The arguments of cuTensorMapEncodeTiled().
struct TensorMap {
  u64 magic;
  u8* base;
  u64 size[5];
  u64 stride[4];
  u16 box[5];
  u8 rank, type, swizzle, element;
};
constexpr u64 kTensorMap = 0x636d617073696d74;
constexpr int kFloat32Map = 7;  // CU_TENSOR_MAP_DATA_TYPE_FLOAT32

}  // namespace cudasim
