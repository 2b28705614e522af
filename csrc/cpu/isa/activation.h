// Computes activations on vectors, for tile.cpp and under its rules.
#pragma once

#include <cstdint>
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
typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
constexpr int kLanes = kVectorBytes / 4;

// Computes the sum of coefficients[i] * x^i.
template <int kCount>
inline Vector polynomial(const float (&coefficients)[kCount], Vector x) {
  Vector sum = coefficients[kCount - 1] - Vector{};
  for (int i = kCount - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// Computes 2^x for x <= 0. A subnormal result, or a NaN, gives 0. The polynomial is within 2e-9 on
// [-0.5, 0.5]; scaling by powers of two is exact.
inline Vector exp2_down(Vector x) {
  constexpr float kCoefficients[] = {1.0f,          0.6931472029f, 0.2402264791f, 0.0555033247f,
                                     0.0096184374f, 0.0013398875f, 0.00015353361f};
  const Integers normal = x > -126.0f;
  x = normal ? x : Vector{};
  const Integers whole = __builtin_convertvector(x - 0.5f, Integers);  // rounds x
  const Vector mantissa = polynomial(kCoefficients, x - __builtin_convertvector(whole, Vector));
  const Integers bits = (whole + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return normal ? mantissa * scale : Vector{};
}

inline Vector magnitude(Vector x) { return x < 0.0f ? -x : x; }

// Clamps x to a range outside which Phi rounds to 0 or 1. Infinities would produce NaNs.
inline Vector where_curved(Vector x) {
  x = x < -128.0f ? Vector{} - 128.0f : x;
  return x > 128.0f ? Vector{} + 128.0f : x;
}

struct Relu {
  static Vector value(Vector x) { return x < 0.0f ? Vector{} : x; }
};

// x * Phi(x), with Phi the normal distribution.
//
// The smaller of Phi and 1 - Phi is exp(-x^2 / 2) times a slowly varying function of |x|. That
// function is approximated within 1e-8 by 1/2 + s * p(s) with s = 0.26 |x| / (1 + 0.26 |x|).
// Nothing cancels for large negative x, and Phi(0) is exact.
struct Gelu {
  static Vector value(Vector x) { return x * cdf(where_curved(x)); }

 private:
  static Vector cdf(Vector x) {
    constexpr float kCoefficients[] = {-1.534393808f,  2.163852074f,  -1.704343986f,
                                       0.5421450631f,  0.1692578119f, -0.0901767191f,
                                       -0.1464281171f, 0.1337134201f, -0.0336321413f};
    const Vector scaled = 0.26f * magnitude(x);
    const Vector s = scaled / (1.0f + scaled);
    const Vector tail =
        exp2_down(x * x * -0.721347520f) * (0.5f + s * polynomial(kCoefficients, s));
    return x < 0.0f ? tail : 1.0f - tail;
  }
};

// Computes 1 / (1 + 2^-exponent).
inline Vector logistic(Vector exponent) {
  const Vector small = exp2_down(-magnitude(exponent));
  const Vector large = 1.0f / (1.0f + small);
  return exponent < 0.0f ? small * large : large;
}

// x * (1 + tanh(u)) / 2 = x / (1 + exp(-2u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
struct GeluTanh {
  static Vector value(Vector x) { return x * logistic(x * (2.302208198f + 0.102943240f * x * x)); }
};

// x / (1 + exp(-x))
struct Silu {
  static Vector value(Vector x) { return x * logistic(1.442695041f * x); }
};

}  // namespace
}  // namespace amp_ext::cpu
