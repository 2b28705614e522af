// Compiled once per instruction set, under the rules of span.cpp, except that a multiply and an add
// may fuse: the order of a matrix product's sum is not promised.
#include "tile.h"

#include <cstring>

namespace amp_ext::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

typedef float Vector __attribute__((vector_size(kVectorBytes)));
constexpr int kLanes = kVectorBytes / 4;
constexpr int kVectors = kTileColumns / kLanes < 4 ? kTileColumns / kLanes : 4;
constexpr int kGroup = kVectors * kLanes;
constexpr int kRows = 4;

inline Vector load(const float* from) {
  Vector result;
  std::memcpy(&result, from, sizeof result);
  return result;
}

// kRowCount rows of c, kGroup columns, all of k: the sums stay in registers.
template <int kRowCount>
void multiply_group(const TileArgs& t, const float* a, const float* b, float* c) {
  Vector sums[kRowCount][kVectors] = {};
  for (int64_t p = 0; p < t.k; ++p) {
    for (int v = 0; v < kVectors; ++v) {
      const Vector factor = load(b + p * t.ldb + v * kLanes);
      for (int r = 0; r < kRowCount; ++r) {
        sums[r][v] += a[r * t.a_row + p * t.a_column] * factor;
      }
    }
  }
  for (int r = 0; r < kRowCount; ++r) std::memcpy(c + r * t.ldb, sums[r], sizeof sums[r]);
}

void multiply(const TileArgs& t) {
  for (int64_t j = 0; j < t.ldb; j += kGroup) {
    int64_t i = 0;
    for (; i + kRows <= t.m; i += kRows) {
      multiply_group<kRows>(t, t.a + i * t.a_row, t.b + j, t.c + i * t.ldb + j);
    }
    for (; i < t.m; ++i) multiply_group<1>(t, t.a + i * t.a_row, t.b + j, t.c + i * t.ldb + j);
  }
}

void finish(float* values, int64_t n, float alpha, float beta, const float* c, const float* bias,
            bool relu) {
  if (alpha != 1) {
    for (int64_t i = 0; i < n; ++i) values[i] *= alpha;
  }
  if (c) {
    for (int64_t i = 0; i < n; ++i) values[i] += beta * c[i];
  }
  if (bias) {
    for (int64_t i = 0; i < n; ++i) values[i] += bias[i];
  }
  if (relu) {
    for (int64_t i = 0; i < n; ++i) values[i] = values[i] < 0 ? 0 : values[i];
  }
}

}  // namespace

namespace AMP_EXT_ISA {

extern const TileKernels tile_kernels;
const TileKernels tile_kernels = {multiply, finish};

}  // namespace AMP_EXT_ISA
}  // namespace amp_ext::cpu
