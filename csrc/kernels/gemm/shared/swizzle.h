// The layout of tiles in shared memory: TMA and wgmma call it the swizzle of 128 bytes.
//
// A tile is rows of 128 bytes, each of eight chunks of 16 bytes, and begins at a multiple of 1024
// bytes. Shared memory serves 128 bytes at a time, one 4-byte word from each of 32 banks. A row is
// read at full speed, but a column of chunks, which is what ldmatrix reads and stmatrix writes,
// would lie in the same four banks in every row. So row r has its chunk c at c ^ r % 8: any eight
// neighbouring rows then have a column in eight different places.
#pragma once

#include "amp_ext/host_device.h"

namespace amp_ext {

constexpr int kSwizzleRowBytes = 128;
constexpr int kSwizzleChunkBytes = 16;
constexpr int kSwizzleAlignment = 1024;  // of tiles, so that TMA's row numbers are the tile's

// The offset in bytes of a chunk, 0 to 7, of a row.
AMP_EXT_HOST_DEVICE constexpr int swizzled(int row, int chunk) {
  return row * kSwizzleRowBytes + (chunk ^ row % 8) * kSwizzleChunkBytes;
}

// The same for rows of kRowBytes, 64 or 128, within which chunks change places. Rows of 64 bytes
// lie two by two in the banks: each pair of them has the next order.
template <int kRowBytes>
AMP_EXT_HOST_DEVICE constexpr int swizzled(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr int kChunks = kRowBytes / kSwizzleChunkBytes;
  const int order = row / (kSwizzleRowBytes / kRowBytes) % kChunks;
  return row * kRowBytes + (chunk ^ order) * kSwizzleChunkBytes;
}

}  // namespace amp_ext
