// Defines the optimizer kernels, compiled once per instruction set under the rules of span.cpp.
#include "isa/update.h"

#include <cstring>

#include "isa/span.h"

namespace amp_ext::cpu {

namespace AMP_EXT_ISA {
extern const SpanKernels kernels;
}

namespace {

constexpr int kTile = 1024;

// A tile of a tensor as fp32: a view of an fp32 tensor, else a copy.
class Tile {
 public:
  Tile(const void* data, DType dtype, int64_t at, int count)
      : place_(const_cast<char*>(static_cast<const char*>(data)) + at * size_of(dtype)),
        dtype_(dtype),
        count_(count) {
    if (dtype != DType::f32)
      AMP_EXT_ISA::kernels.widen[static_cast<int>(dtype)](place_, count, copy_);
  }

  float* data() { return dtype_ == DType::f32 ? reinterpret_cast<float*>(place_) : copy_; }

  void round_to_nearest(DType dtype, void* to) {
    AMP_EXT_ISA::kernels.narrow[static_cast<int>(dtype)](data(), count_, to);
  }

  // Writes the tile back. `first` is the index of its first element in the chunk. Stochastic
  // rounding uses the bits of noise(key, element, pair) from `shift` on.
  void store(const uint32_t* key, uint32_t first, uint32_t pair, int shift) {
    if (dtype_ == DType::f32) return;
    if (!key || dtype_ != DType::bf16) return round_to_nearest(dtype_, place_);
    auto* const to = reinterpret_cast<uint16_t*>(place_);
    const uint32_t k = *key;
    for (int i = 0; i < count_; ++i)
      to[i] = bf16_by_chance(copy_[i], noise(k, first + i, pair) >> shift & 0xffff);
  }

 private:
  char* place_;
  DType dtype_;
  int count_;
  alignas(64) float copy_[kTile];  // vectors across two cache lines take 1.5 times as long
};

// Replaces elements of an fp32 param that do not round to its copy.
void replace_stale(const UpdateRef& u, Tile& param, int64_t at, int count) {
  if (!u.copy) return;
  Tile stored(u.copy, u.copy_dtype, at, count);
  const auto* const halves = static_cast<const uint16_t*>(u.copy) + at;
  uint16_t expected[kTile];
  param.round_to_nearest(u.copy_dtype, expected);
  float *const p = param.data(), *const s = stored.data();
#pragma omp simd
  for (int i = 0; i < count; ++i) p[i] = halves[i] == expected[i] ? p[i] : s[i];
}

void store_param(const UpdateRef& u, Tile& param, int64_t at, const uint32_t* key, uint32_t first) {
  param.store(key, first, 0, 0);
  if (u.copy)
    param.round_to_nearest(u.copy_dtype, static_cast<char*>(u.copy) + at * size_of(u.copy_dtype));
}

// Calls body(first, count) for tiles that cover n elements.
template <class Body>
inline void for_each_tile(int64_t n, Body body) {
  for (int64_t first = 0; first < n; first += kTile)
    body(static_cast<uint32_t>(first), static_cast<int>(n - first < kTile ? n - first : kTile));
}

void adam(const UpdateRef& u, int64_t begin, int64_t n, const AdamFactors& factors,
          const uint32_t* key) {
  for_each_tile(n, [&](uint32_t first, int count) {
    const AdamFactors f = factors;  // a copy that no store can change
    const int64_t at = begin + first;
    Tile param(u.param, u.param_dtype, at, count);
    replace_stale(u, param, at, count);
    Tile grad(u.grad, u.grad_dtype, at, count);
    Tile exp_avg(u.exp_avg, u.exp_avg_dtype, at, count);
    Tile exp_avg_sq(u.exp_avg_sq, u.exp_avg_sq_dtype, at, count);
    float *const p = param.data(), *const g = grad.data();
    float *const m = exp_avg.data(), *const v = exp_avg_sq.data();
    const auto update_moments = [&](int i) {
      const float used = used_gradient(f, g[i], p[i]);
      m[i] = next_exp_avg(f, m[i], used);
      v[i] = next_exp_avg_sq(f, v[i], used);
    };
    if (u.max_exp_avg_sq) {
      Tile max_exp_avg_sq(u.max_exp_avg_sq, u.exp_avg_sq_dtype, at, count);
      float* const most = max_exp_avg_sq.data();
#pragma omp simd
      for (int i = 0; i < count; ++i) {
        update_moments(i);
        most[i] = larger(most[i], v[i]);
        p[i] = next_param(f, p[i], m[i], most[i]);
      }
      max_exp_avg_sq.store(key, first, 1, 16);
    } else {
#pragma omp simd
      for (int i = 0; i < count; ++i) {
        update_moments(i);
        p[i] = next_param(f, p[i], m[i], v[i]);
      }
    }
    exp_avg.store(key, first, 0, 16);
    exp_avg_sq.store(key, first, 1, 0);
    store_param(u, param, at, key, first);
  });
}

void sgd(const UpdateRef& u, int64_t begin, int64_t n, const SgdFactors& factors,
         const uint32_t* key) {
  for_each_tile(n, [&](uint32_t first, int count) {
    const SgdFactors f = factors;  // a copy that no store can change
    const int64_t at = begin + first;
    Tile param(u.param, u.param_dtype, at, count);
    replace_stale(u, param, at, count);
    Tile grad(u.grad, u.grad_dtype, at, count);
    float *const p = param.data(), *const g = grad.data();
    if (u.exp_avg) {
      Tile momentum(u.exp_avg, u.exp_avg_dtype, at, count);
      float* const m = momentum.data();
#pragma omp simd
      for (int i = 0; i < count; ++i) {
        const float used = used_gradient(f, g[i], p[i]);
        m[i] = next_momentum(f, m[i], used);
        p[i] = next_param(f, p[i], with_lookahead(f, m[i], used));
      }
      momentum.store(key, first, 0, 16);
    } else {
#pragma omp simd
      for (int i = 0; i < count; ++i) p[i] = next_param(f, p[i], used_gradient(f, g[i], p[i]));
    }
    store_param(u, param, at, key, first);
  });
}

}  // namespace

namespace AMP_EXT_ISA {

extern const UpdateKernels update_kernels;
const UpdateKernels update_kernels = {adam, sgd};

}  // namespace AMP_EXT_ISA
}  // namespace amp_ext::cpu
