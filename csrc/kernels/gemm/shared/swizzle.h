// Lays out tiles in shared memory with the 128-byte swizzle of TMA and wgmma.
//
// A tile begins at a multiple of 1024 bytes and has rows of 128 bytes, each of eight 16-byte
// chunks. Shared memory serves one 4-byte word from each of 32 banks at a time. A row is read at
// full speed. A column of chunks, as ldmatrix reads and stmatrix writes it, would lie in the same
// four banks in every row. Chunk c of row r is therefore stored at c ^ r % 8, which puts a column
// of eight neighbouring rows in eight places.
#pragma once

#include "amp_ext/host_device.h"

namespace amp_ext {

constexpr int kSwizzleRowBytes = 128;
constexpr int kSwizzleChunkBytes = 16;
constexpr int kSwizzleAlignment = 1024;  // alignment of a tile, so that its row numbers match TMA's

// Returns the byte offset of a row's chunk, 0 to 7.
AMP_EXT_HOST_DEVICE constexpr int swizzled(int row, int chunk) {
  return row * kSwizzleRowBytes + (chunk ^ row % 8) * kSwizzleChunkBytes;
}

// Returns the byte offset for rows of kRowBytes, 64 or 128. Two rows of 64 bytes fill the banks, so
// each pair of rows changes the order of chunks.
template <int kRowBytes>
AMP_EXT_HOST_DEVICE constexpr int swizzled(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  constexpr int kChunks = kRowBytes / kSwizzleChunkBytes;
  const int order = row / (kSwizzleRowBytes / kRowBytes) % kChunks;
  return row * kRowBytes + (chunk ^ order) * kSwizzleChunkBytes;
}

}  // namespace amp_ext
