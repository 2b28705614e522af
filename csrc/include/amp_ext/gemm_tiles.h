// The instances of the GEMM kernel for fp16 and bf16: which tiles there are, what they take of a
// multiprocessor, and what a launch is told.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amp_ext/host_device.h"

namespace amp_ext {

// Which index of an operand is contiguous in memory: k, or m of a and n of b.
enum class Major : uint8_t { k, mn };

// What one block computes, and how: m x n elements of the result by warps_m x warps_n warps, in
// steps of k. `stages` steps are in shared memory at a time.
struct GemmTile {
  int m;
  int n;
  int k;
  int warps_m;
  int warps_n;
  int stages;
  bool aligned;  // needs operands whose lines and matrices begin at multiples of 16 bytes

  AMP_EXT_HOST_DEVICE constexpr int threads() const { return 32 * warps_m * warps_n; }
  AMP_EXT_HOST_DEVICE constexpr int warp_m() const { return m / warps_m; }
  AMP_EXT_HOST_DEVICE constexpr int warp_n() const { return n / warps_n; }

  // Shared memory: the ring of stages, and in its place, when the sums are there, some rows of each
  // warp's part of them in fp32, padded by 8 elements a row, and a flag; in whole KiB.
  AMP_EXT_HOST_DEVICE constexpr int staged_rows() const { return warp_m() < 32 ? warp_m() : 32; }
  constexpr int ring_bytes() const { return stages * (m + n) * k * 2; }
  constexpr int staging_bytes() const {
    return warps_m * warps_n * staged_rows() * (warp_n() + 8) * 4;
  }
  constexpr int shared_bytes() const {
    return (std::max(ring_bytes(), staging_bytes() + 1) + 1023) / 1024 * 1024;
  }

  // Registers of a thread: its sums, the fragments of two steps of 16 along k, and an allowance for
  // everything else.
  constexpr int registers() const {
    const int sums = warp_m() * warp_n() / 32;
    const int fragments = 2 * (warp_m() / 16 + warp_n() / 16) * 4;
    return (sums + fragments + 48 + 7) / 8 * 8;
  }

  // Blocks that fit a multiprocessor of sm_80.
  constexpr int resident_blocks() const {
    const int by_registers = 65536 / (registers() * threads());
    const int by_shared = (164 << 10) / (shared_bytes() + 1024);  // 1 KiB a block is the system's
    return std::min({by_registers, by_shared, 2048 / threads()});
  }
};

// The first ones are for large results: a warp's part of 64 x 64 reads the fewest bytes of shared
// memory a product. Then two for results of few rows or columns; the last
// two take operands of any alignment.
inline constexpr GemmTile kGemmTiles[] = {
    {256, 128, 32, 4, 2, 4, true}, {128, 128, 32, 2, 2, 4, true},  {128, 64, 32, 2, 2, 4, true},
    {64, 128, 32, 2, 2, 4, true},  {64, 64, 64, 2, 2, 3, true},    {16, 128, 64, 1, 4, 4, true},
    {128, 16, 64, 4, 1, 4, true},  {128, 128, 32, 4, 2, 2, false}, {64, 64, 32, 2, 2, 2, false},
};
constexpr int kGemmTileCount = sizeof(kGemmTiles) / sizeof(kGemmTiles[0]);

constexpr bool is_sound(const GemmTile& t) {
  // Lines of shared memory are swizzled in rows of 64 elements, which they fill or share evenly.
  const auto is_line = [](int elements) { return elements % 64 == 0 || 64 % elements == 0; };
  return is_line(t.m) && is_line(t.n) && is_line(t.k) && t.k % 32 == 0 && t.k <= 64 &&
         t.warp_m() % 16 == 0 && t.warp_m() <= 64 && t.warp_n() % 16 == 0 && t.warp_n() <= 64 &&
         t.stages >= 2 && t.registers() <= 255 &&
         t.shared_bytes() <= 99 << 10 &&  // what a block may have on sm_86 and sm_89
         t.resident_blocks() >= 1;
}

constexpr bool all_are_sound() {
  for (const GemmTile& tile : kGemmTiles)
    if (!is_sound(tile)) return false;
  return true;
}
static_assert(all_are_sound());

// How a product is computed. A block computes one tile of the result, or one of the equal shares of
// its steps along k; the shares' sums are added up by whichever of them ends last.
struct GemmPlan {
  int tile = 0;  // in kGemmTiles
  Major a_major = Major::k;
  Major b_major = Major::k;
  uint32_t tiles_m = 0;
  uint32_t tiles_n = 0;
  uint32_t blocks = 0;  // 0: there is nothing to do
  uint32_t splits = 1;  // shares of each tile's steps
  uint32_t group = 1;   // rows of tiles that are computed together, column by column
  int terms = 1;
  int term_steps = 0;              // along k
  int steps = 0;                   // of all terms
  int64_t column_sums_offset = 0;  // in the workspace, in bytes; the splits' sums are before it
  int64_t workspace_bytes = 0;
  int64_t tickets = 0;  // one for each tile if there are splits, one for each column of tiles if
                        // there are column sums
};

}  // namespace amp_ext
