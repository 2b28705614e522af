// Order accesses by release, acquire and fences.
#pragma once

#include "arithmetic/lanes.h"

namespace cudasim {

// Flags of an access, from its words.
enum OrderFlags : s32 {
  strong = 1,  // volatile, relaxed, acquire, release, atomic
  wide = 2,    // of the scope of the device or more
  acquires = 4,
  releases = 8,
  replaces = 16,  // a store; it ends earlier releases
};

s32 order_of(const Decoder& d, bool is_atomic);

// A strong read or write at `address`. After a writing one, the warp's clock ticks.
void acquire(Warp& w, int lane, const u8* address, s32 flags);
void release(Warp& w, const u8* address, s32 flags);

}  // namespace cudasim
