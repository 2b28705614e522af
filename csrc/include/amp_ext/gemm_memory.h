// What a product moves between memory and L2, as far as a planner can know.
#pragma once

#include <algorithm>
#include <cstdint>

#include "amp_ext/gemm_serves.h"

namespace amp_ext {

// Of an H200: 4.8 TB/s by its data sheet, in bytes a cycle of 1.83 GHz, the clock of the data
// sheet's tensor rate.
constexpr double kGemmMemoryBytes = 4.8e12 / 1.83e9;
// Half of its L2 of 60 MB. A guess: the other half is for what passes through, and for copies,
// since each half of the multiprocessors has an L2 of its own.
constexpr double kGemmKeptBytes = 30e6;

// The tiles of a scheduler: of so many elements, so many of them, `together` at a time.
struct TileGrid {
  int64_t m;
  int64_t n;
  int64_t tiles_m;
  int64_t tiles_n;
  int64_t together;
};

// Bytes of a and b that come from memory when tiles are computed in groups of so many rows, column
// by column. Tiles at work together keep step, and so read what they share once. Of what is needed
// again later L2 has kept kGemmKeptBytes.
inline double operand_bytes(const GemmArgs& g, const TileGrid& grid, int64_t group) {
  const double line = 2.0 * g.k * g.terms;
  const int64_t columns = std::min(grid.tiles_n, ceil_div(grid.together, group));
  const int64_t rows = std::min(grid.tiles_m, std::max(group, ceil_div(grid.together, columns)));
  const double a_kept = rows * grid.m * line;
  const bool keeps_a = a_kept + columns * grid.n * line <= kGemmKeptBytes;
  const bool keeps_b = a_kept + g.n * line <= kGemmKeptBytes;
  const int64_t a_times = keeps_a ? 1 : ceil_div(grid.tiles_n, columns);
  const int64_t b_times = keeps_b ? 1 : ceil_div(grid.tiles_m, rows);
  return g.batch * line * (double(g.m) * a_times + double(g.n) * b_times);
}

// Bytes of all else: what is read for the result, and the result.
inline double result_bytes(const GemmArgs& g) {
  int bytes = size_of(g.out.dtype);
  if (g.c.data) bytes += size_of(g.c.dtype);
  if (g.aux.data) bytes += size_of(g.aux.dtype);
  return double(g.batch) * g.m * g.n * bytes;
}

// The group for which the fewest bytes come from memory, and among equals that with the fewest
// rows of a and columns of b at a time.
inline uint32_t group_rows(const GemmArgs& g, const TileGrid& grid) {
  uint32_t best = 1;
  double fewest_bytes = INFINITY, fewest_lines = INFINITY;
  for (int64_t group = 1; group <= std::min<int64_t>(grid.tiles_m, 64); group *= 2) {
    const int64_t columns = std::min(grid.tiles_n, ceil_div(grid.together, group));
    const int64_t rows = std::min(grid.tiles_m, ceil_div(grid.together, columns));
    const double bytes = operand_bytes(g, grid, group), lines = rows * grid.m + columns * grid.n;
    if (bytes > fewest_bytes || (bytes == fewest_bytes && lines >= fewest_lines)) continue;
    best = static_cast<uint32_t>(group), fewest_bytes = bytes, fewest_lines = lines;
  }
  return best;
}

// What a product takes that computes and moves for so many cycles, mostly at the same time: how
// much of the shorter one shows is a guess.
inline double together_cycles(double computing, double bytes) {
  const double moving = bytes / kGemmMemoryBytes;
  return std::max(computing, moving) + std::min(computing, moving) / 8;
}

}  // namespace amp_ext
