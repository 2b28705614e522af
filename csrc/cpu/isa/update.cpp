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
  float copy_[kTile];
};

void store_param(const UpdateRef& span, Tile& param, int64_t at, const uint32_t* key) {
  param.store(key, static_cast<uint32_t>(at), 0, 0);
  if (span.copy)
    param.round_to_nearest(span.copy_dtype,
                           static_cast<char*>(span.copy) + at * size_of(span.copy_dtype));
}

// Calls tile(at, count) for tiles that cover n elements.
template <class Body>
inline void for_each_tile(int64_t n, Body body) {
  for (int64_t at = 0; at < n; at += kTile)
    body(at, static_cast<int>(n - at < kTile ? n - at : kTile));
}

void update_moments(const AdamFactors& factors, int n, const float* __restrict param,
                    const float* __restrict grad, float* __restrict exp_avg,
                    float* __restrict exp_avg_sq) {
  const AdamFactors f = factors;
  for (int i = 0; i < n; ++i) {
    const float g = used_gradient(f, grad[i], param[i]);
    exp_avg[i] = next_exp_avg(f, exp_avg[i], g);
    exp_avg_sq[i] = next_exp_avg_sq(f, exp_avg_sq[i], g);
  }
}

void keep_largest(int n, float* __restrict largest, const float* __restrict exp_avg_sq) {
  for (int i = 0; i < n; ++i) largest[i] = larger(largest[i], exp_avg_sq[i]);
}

void update_params(const AdamFactors& factors, int n, float* __restrict param,
                   const float* __restrict exp_avg, const float* __restrict exp_avg_sq) {
  const AdamFactors f = factors;
  for (int i = 0; i < n; ++i) param[i] = next_param(f, param[i], exp_avg[i], exp_avg_sq[i]);
}

void adam(const UpdateRef& span, const AdamFactors& factors, const uint32_t* key) {
  for_each_tile(span.numel, [&](int64_t at, int count) {
    Tile param(span.param, span.param_dtype, at, count);
    Tile grad(span.grad, span.grad_dtype, at, count);
    Tile exp_avg(span.exp_avg, span.exp_avg_dtype, at, count);
    Tile exp_avg_sq(span.exp_avg_sq, span.exp_avg_sq_dtype, at, count);
    update_moments(factors, count, param.data(), grad.data(), exp_avg.data(), exp_avg_sq.data());
    const auto first = static_cast<uint32_t>(at);
    if (span.max_exp_avg_sq) {
      Tile largest(span.max_exp_avg_sq, span.exp_avg_sq_dtype, at, count);
      keep_largest(count, largest.data(), exp_avg_sq.data());
      update_params(factors, count, param.data(), exp_avg.data(), largest.data());
      largest.store(key, first, 1, 16);
    } else {
      update_params(factors, count, param.data(), exp_avg.data(), exp_avg_sq.data());
    }
    exp_avg.store(key, first, 0, 16);
    exp_avg_sq.store(key, first, 1, 0);
    store_param(span, param, at, key);
  });
}

void update_momentum(const SgdFactors& factors, int n, float* __restrict param,
                     const float* __restrict grad, float* __restrict momentum) {
  const SgdFactors f = factors;
  for (int i = 0; i < n; ++i) {
    const float g = used_gradient(f, grad[i], param[i]);
    momentum[i] = next_momentum(f, momentum[i], g);
    param[i] = next_param(f, param[i], with_lookahead(f, momentum[i], g));
  }
}

void descend(const SgdFactors& factors, int n, float* __restrict param,
             const float* __restrict grad) {
  const SgdFactors f = factors;
  for (int i = 0; i < n; ++i)
    param[i] = next_param(f, param[i], used_gradient(f, grad[i], param[i]));
}

void sgd(const UpdateRef& span, const SgdFactors& factors, const uint32_t* key) {
  for_each_tile(span.numel, [&](int64_t at, int count) {
    Tile param(span.param, span.param_dtype, at, count);
    Tile grad(span.grad, span.grad_dtype, at, count);
    if (span.exp_avg) {
      Tile momentum(span.exp_avg, span.exp_avg_dtype, at, count);
      update_momentum(factors, count, param.data(), grad.data(), momentum.data());
      momentum.store(key, static_cast<uint32_t>(at), 0, 16);
    } else {
      descend(factors, count, param.data(), grad.data());
    }
    store_param(span, param, at, key);
  });
}

}  // namespace

namespace AMP_EXT_ISA {

extern const UpdateKernels update_kernels;
const UpdateKernels update_kernels = {adam, sgd};

}  // namespace AMP_EXT_ISA
}  // namespace amp_ext::cpu
