// Compiled once per instruction set, under the rules of span.cpp, except that a multiply and an add
// may fuse: the order of a matrix product's sum is not promised.
#include "isa/tile.h"

#include <cstring>

#include "isa/activation.h"

namespace amp_ext::cpu {
namespace {

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

void combine(float* values, int64_t n, float alpha, float beta, const float* c, const float* bias) {
  if (alpha != 1) {
    for (int64_t i = 0; i < n; ++i) values[i] *= alpha;
  }
  if (c) {
    for (int64_t i = 0; i < n; ++i) values[i] += beta * c[i];
  }
  if (bias) {
    for (int64_t i = 0; i < n; ++i) values[i] += bias[i];
  }
}

// Calls body(i, count) for vectors from place i on, of which the last has fewer elements.
template <class Body>
void for_each_vector(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, static_cast<int>(n - i));
}

inline Vector load(const float* from, int count) {
  Vector result{};
  std::memcpy(&result, from, count * sizeof(float));
  return result;
}

inline void store(Vector value, int count, float* to) {
  std::memcpy(to, &value, count * sizeof(float));
}

template <class Function>
void activate(float* values, int64_t n) {
  for_each_vector(n, [=](int64_t i, int count) {
    store(Function::value(load(values + i, count)), count, values + i);
  });
}

template <class Function>
void differentiate(float* values, int64_t n, const float* at) {
  for_each_vector(n, [=](int64_t i, int count) {
    const Vector result = Function::times_derivative(load(values + i, count), load(at + i, count));
    store(result, count, values + i);
  });
}

void add_rows(const float* values, int64_t rows, int64_t n, int64_t ld, float* sums) {
  for_each_vector(n, [=](int64_t j, int count) {
    Vector total{};
    for (int64_t i = 0; i < rows; ++i) total += load(values + i * ld + j, count);
    store(load(sums + j, count) + total, count, sums + j);
  });
}

}  // namespace

namespace AMP_EXT_ISA {

extern const TileKernels tile_kernels;
const TileKernels tile_kernels = {
    multiply,
    combine,
    {nullptr, activate<Relu>, activate<Gelu>, activate<GeluTanh>, activate<Silu>},
    {nullptr, differentiate<Relu>, differentiate<Gelu>, differentiate<GeluTanh>,
     differentiate<Silu>},
    add_rows,
};

}  // namespace AMP_EXT_ISA
}  // namespace amp_ext::cpu
