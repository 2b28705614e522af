// The arguments of the matrix products.
//
// Pointers are device pointers for the CUDA and Triton kernels and host pointers for a CPU's,
// except where a comment says otherwise.
#pragma once

#include <cstdint>

#include "amp_ext/dtype.h"

namespace amp_ext {

// A batch of matrices in any layout: element (b, i, j) is
// data[b * batch_stride + i * row_stride + j * column_stride]. A stride of 0 repeats.
struct MatrixRef {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;

  bool operator==(const MatrixRef&) const = default;
};

// A vector: element i is data[i * stride]. A stride of 0 repeats.
struct VectorRef {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;

  bool operator==(const VectorRef&) const = default;
};

// relu keeps NaN. gelu is x * Phi(x) by erf, gelu_tanh its approximation by tanh, silu
// x / (1 + exp(-x)), as in torch.
enum class Activation : uint8_t { none, relu, gelu, gelu_tanh, silu };
constexpr int kActivations = 5;
constexpr const char* kActivationNames[kActivations] = {"none", "relu", "gelu", "gelu_tanh",
                                                        "silu"};
inline const char* activation_name(Activation activation) {
  return kActivationNames[static_cast<int>(activation)];
}

// The kernels that the CUDA backend has for products: by mma.sync, and by wgmma and TMA.
struct GemmKernels {
  bool sm80 = false;
  bool sm90 = false;

  bool operator==(const GemmKernels&) const = default;
};

// x = alpha * a @ b + beta * c + bias, accumulated in fp32; a and b are not fp64. Matrix i of out
// has the sum of the products i * terms, ..., (i + 1) * terms - 1 of a and b.
//
// Forward: out = activation(x), and aux = x where there is an aux. Backward, with `derivative`:
// out = x * activation'(aux), where aux is what a forward product stored; for relu 0
// where aux <= 0, else x.
struct GemmArgs {
  MatrixRef a;     // m x k
  MatrixRef b;     // k x n
  MatrixRef c;     // m x n; its data may be null, with a beta of 0, or that of out in out's layout
  MatrixRef aux;   // m x n, column_stride 1; its data may be null
  MatrixRef out;   // m x n, column_stride 1
  VectorRef bias;  // n, added to every row; its data may be null
  int64_t batch;
  int64_t terms;
  int64_t m;
  int64_t n;
  int64_t k;
  double alpha;
  double beta;
  Activation activation;
  bool derivative;
  GemmKernels kernels{true, true};  // that may compute it, of a backend that has them
  // n, the sums of out's columns over rows and batch before they are rounded, in fp64 where a
  // product is, else in fp32; may be null
  void* column_sums;
  // Which of a backend's ways to compute it (GemmBackend::gemm_variants); 0: the backend's own
  // choice.
  int64_t variant = 0;

  bool operator==(const GemmArgs&) const = default;
};

inline bool adds_to_out(const GemmArgs& g) { return g.c.data && g.c.data == g.out.data; }

// A tile that is given instead of chosen, for verification, tests and tools.
struct GemmTileChoice {
  bool sm90 = false;  // of the kernels for sm_90a, or of those for sm_80
  int tile = 0;       // its number
  int cluster_m = 1;
  int cluster_n = 1;
  int64_t splits = 1;
  int64_t ranges = 0;
};

}  // namespace amp_ext
