// The planner of the CUDA gemm for Python, with no more than a compiler of C++.
#include <algorithm>
#include <optional>
#include <string>

#include "gemm/plan/choose.h"
#include "plan_text.h"

namespace {

using namespace amp_ext;

// A dense matrix, or its transpose; its memory is never read.
MatrixRef dense(int64_t rows, int64_t columns, bool transposed, DType dtype) {
  void* const data = reinterpret_cast<void*>(1 << 20);
  return {data, dtype, rows * columns, transposed ? 1 : columns, transposed ? rows : 1};
}

}  // namespace

extern "C" {

// A tile of the kernels for sm_90a or sm_80 in words, or null without a tile of this number.
const char* gemm_tile(bool sm90, int tile) {
  if (tile < 0 || tile >= (sm90 ? kSm90TileCount : kGemmTileCount)) return nullptr;
  static thread_local std::string text;
  text = sm90 ? describe(kSm90Tiles[tile]) : describe(kGemmTiles[tile]);
  return text.c_str();
}

// The plan of dense 16-bit matrices in words, with a tile of sm_90a if it is not -1. `cycles`
// receives its predicted time.
const char* gemm_plan(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, bool fp32_out,
                      int multiprocessors, bool sm90, int tile, int64_t splits, double* cycles) {
  GemmArgs g{};
  g.batch = g.terms = 1;
  g.m = m;
  g.n = n;
  g.k = k;
  g.alpha = 1;
  g.a = dense(m, k, trans_a, DType::f16);
  g.b = dense(k, n, trans_b, DType::f16);
  g.out = dense(m, n, false, fp32_out ? DType::f32 : DType::f16);
  if (tile >= 0) g.variant = variant_of(GemmTileChoice{true, tile, splits});
  const GemmDevice device{multiprocessors, sm90};
  const GemmCandidate best = choose(g, device);
  static thread_local std::string text;
  text = describe(make_plan(g, best, device));
  *cycles = best.cycles;
  return text.c_str();
}

}  // extern "C"
