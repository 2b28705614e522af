// Defines the compiled tiles of the GEMM kernels, their use of a multiprocessor, and the plan of a
// launch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amp_ext/host_device.h"

namespace amp_ext {

constexpr int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

// The contiguous index of an operand in memory: k, or mn (m of a, n of b).
enum class Major : uint8_t { k, mn };

// ---- sm_80: mma.sync and cp.async ---------------------------------------------------------------

// A tile of sm_80: warps_m x warps_n warps compute m x n elements in steps of k, with `stages`
// steps in shared memory.
struct GemmTile {
  int m;
  int n;
  int k;
  int warps_m;
  int warps_n;
  int stages;
  bool aligned;  // requires lines and matrices at multiples of 16 bytes

  AMP_EXT_HOST_DEVICE constexpr int threads() const { return 32 * warps_m * warps_n; }
  AMP_EXT_HOST_DEVICE constexpr int warp_m() const { return m / warps_m; }
  AMP_EXT_HOST_DEVICE constexpr int warp_n() const { return n / warps_n; }

  // Shared memory in whole KiB: the ring of stages, reused by the epilogue for a flag and some rows
  // of each warp's sums. These rows are fp32, padded by 8 elements.
  AMP_EXT_HOST_DEVICE constexpr int staged_rows() const { return warp_m() < 32 ? warp_m() : 32; }
  constexpr int ring_bytes() const { return stages * (m + n) * k * 2; }
  constexpr int staging_bytes() const {
    return warps_m * warps_n * staged_rows() * (warp_n() + 8) * 4;
  }
  constexpr int shared_bytes() const {
    return (std::max(ring_bytes(), staging_bytes() + 1) + 1023) / 1024 * 1024;
  }

  // Registers per thread: its sums, the fragments of two steps of 16 along k, and an allowance for
  // the rest.
  constexpr int registers() const {
    const int sums = warp_m() * warp_n() / 32;
    const int fragments = 2 * (warp_m() / 16 + warp_n() / 16) * 4;
    return (sums + fragments + 48 + 7) / 8 * 8;
  }

  // Returns how many blocks fit a multiprocessor of sm_80.
  constexpr int resident_blocks() const {
    const int by_registers = 65536 / (registers() * threads());
    const int by_shared = (164 << 10) / (shared_bytes() + 1024);  // 1 KiB is reserved
    return std::min({by_registers, by_shared, 2048 / threads()});
  }
};

// The first tiles serve large results: a warp's 64 x 64 elements read the fewest bytes of shared
// memory per multiply-add. Two tiles serve few rows or columns, and the last two serve unaligned
// operands.
inline constexpr GemmTile kGemmTiles[] = {
    {256, 128, 32, 4, 2, 4, true}, {128, 128, 32, 2, 2, 4, true},  {128, 64, 32, 2, 2, 4, true},
    {64, 128, 32, 2, 2, 4, true},  {64, 64, 64, 2, 2, 3, true},    {16, 128, 64, 1, 4, 4, true},
    {128, 16, 64, 4, 1, 4, true},  {128, 128, 32, 4, 2, 2, false}, {64, 64, 32, 2, 2, 2, false},
};
constexpr int kGemmTileCount = sizeof(kGemmTiles) / sizeof(kGemmTiles[0]);

constexpr bool is_sound(const GemmTile& t) {
  // Lines fill rows of 64 elements or divide them evenly, as the swizzle requires.
  const auto is_line = [](int elements) { return elements % 64 == 0 || 64 % elements == 0; };
  return is_line(t.m) && is_line(t.n) && is_line(t.k) && t.k % 32 == 0 && t.k <= 64 &&
         t.warp_m() % 16 == 0 && t.warp_m() <= 64 && t.warp_n() % 16 == 0 && t.warp_n() <= 64 &&
         t.stages >= 2 && t.registers() <= 255 &&
         t.shared_bytes() <= 99 << 10 &&  // limit of a block on sm_86 and sm_89
         t.resident_blocks() >= 1;
}

static_assert(std::ranges::all_of(kGemmTiles, [](const GemmTile& t) { return is_sound(t); }));

// ---- sm_90a: wgmma and TMA ----------------------------------------------------------------------

// A tile of sm_90a: a block computes m x n elements in steps of 64 along k. One warpgroup produces,
// two consume. Cooperative consumers each compute half of a tile's rows. Ping-pong consumers
// alternate tiles, so that one multiplies during the other's epilogue.
struct Sm90Tile {
  int m;
  int n;
  bool ping_pong;

  static constexpr int kStep = 64;  // along k: one atom of TMA and wgmma, 128 bytes
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = (1 + kConsumers) * 128;
  // A part is 64 rows by 32 columns: a consumer finishes one at a time, and TMA stores it from a
  // box of shared memory. A box of a plain result (see is_plain) has rows of 128 bytes instead.
  static constexpr int kBoxRows = 64;
  static constexpr int kPartColumns = 32;
  AMP_EXT_HOST_DEVICE static constexpr int box_columns(bool plain, int element_bytes) {
    return plain ? 128 / element_bytes : kPartColumns;
  }
  static constexpr int kMostStages = 8;
  static constexpr int kMostBoxes = 4;            // per consumer
  static constexpr int kHeaderBytes = 3 << 10;    // barriers, units and the bias
  static constexpr int kSharedBytes = 227 << 10;  // limit of a block

  AMP_EXT_HOST_DEVICE constexpr int consumer_m() const { return ping_pong ? m : m / kConsumers; }
  // Accumulators per thread of a consumer.
  constexpr int sums() const { return consumer_m() * n / 128; }

  // Registers per thread. The block starts with 168 each, and the producers release some of theirs.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  // Shared memory holds the header, the consumers' boxes, and as many stages as fit.
  AMP_EXT_HOST_DEVICE constexpr int stage_bytes() const { return (m + n) * kStep * 2; }
  AMP_EXT_HOST_DEVICE static constexpr int boxes_bytes(int boxes, int box_bytes) {
    return kConsumers * boxes * box_bytes;
  }
  constexpr int shared_bytes(int stages, int boxes, int box_bytes) const {
    return kHeaderBytes + boxes_bytes(boxes, box_bytes) + stages * stage_bytes();
  }
  constexpr int stages(int boxes, int box_bytes) const {
    const int room = kSharedBytes - kHeaderBytes - boxes_bytes(boxes, box_bytes);
    return std::min(kMostStages, room / stage_bytes());
  }
  // Four boxes hold results or parts of c. A plain result has two if that leaves room
  // for one more stage.
  constexpr int boxes(bool plain, int box_bytes) const {
    return plain && stages(2, box_bytes) > stages(kMostBoxes, box_bytes) ? 2 : kMostBoxes;
  }
};

inline constexpr Sm90Tile kSm90Tiles[] = {
    {128, 256, false}, {256, 128, false}, {128, 192, false},
    {128, 128, true},  {64, 256, true},   {64, 128, true},
};
constexpr int kSm90TileCount = sizeof(kSm90Tiles) / sizeof(kSm90Tiles[0]);

constexpr bool is_sound(const Sm90Tile& t) {
  constexpr int kRegisters =
      (Sm90Tile::kProducerRegisters + Sm90Tile::kConsumers * Sm90Tile::kConsumerRegisters) * 128;
  return t.consumer_m() % 64 == 0 && t.m <= 256 && t.n % 64 == 0 && t.n <= 256 &&
         kRegisters <= 65536 && kRegisters <= 168 * Sm90Tile::kThreads &&
         t.sums() + 100 <= Sm90Tile::kConsumerRegisters &&
         t.stages(Sm90Tile::kMostBoxes, Sm90Tile::kBoxRows * 128) >= 3;
}

static_assert(std::ranges::all_of(kSm90Tiles, [](const Sm90Tile& t) { return is_sound(t); }));

// ---- both ---------------------------------------------------------------------------------------

struct TileExtents {
  int m;
  int n;
  int k;
};

constexpr TileExtents extents(bool sm90, int tile) {
  if (sm90) return {kSm90Tiles[tile].m, kSm90Tiles[tile].n, Sm90Tile::kStep};
  return {kGemmTiles[tile].m, kGemmTiles[tile].n, kGemmTiles[tile].k};
}

// ---- devices ------------------------------------------------------------------------------------

// The device properties that the planner uses.
struct GemmDevice {
  int multiprocessors = 1;
  bool sm90 = false;  // runs code for sm_90a
};

// ---- plans --------------------------------------------------------------------------------------

// Describes how to compute a product. Each tile is cut along k into `splits` units, its shares. The
// share that ends last adds its tile's shares, in order. sm_80 has one block per unit, sm_90a has
// persistent blocks.
struct GemmPlan {
  bool sm90 = false;
  int tile = 0;  // index in kSm90Tiles or kGemmTiles
  Major a_major = Major::k;
  Major b_major = Major::k;
  uint32_t tiles_m = 0;
  uint32_t tiles_n = 0;
  uint32_t splits = 1;
  uint32_t units = 0;  // 0: no work
  uint32_t blocks = 0;
  uint32_t group = 1;  // rows of tiles computed together, column by column
  int terms = 1;
  int term_steps = 0;  // along k
  int steps = 0;       // of all terms

  // Only for sm_90a:
  int stages = 0;
  int boxes = 0;  // per consumer
  int box_columns = 0;
  bool plain = false;  // see is_plain in serves.h
  int shared_bytes = 0;
  bool reduce = false;  // TMA adds the product to out

  int64_t workspace_bytes = 0;  // the shares' sums
  int64_t tickets = 0;          // of cut tiles
};

}  // namespace amp_ext
