// The kernel API: one plain struct and one launcher per op, for each backend. No torch, no CUDA
// headers.
//
// Launchers allocate nothing, synchronise nothing and check nothing: bindings have checked.
// Pointers are device pointers for cuda::, host pointers for cpu::, except where a comment says
// otherwise.
#pragma once

#include <cstdint>

#include "amp_ext/chunk_table.h"
#include "amp_ext/dtype.h"
#include "amp_ext/error.h"

namespace amp_ext {

// A list of tensors, or of tensors that belong together. `refs` is host memory for both backends.
template <class Ref>
struct ListOf {
  const Ref* refs = nullptr;
  int64_t size = 0;
  // cuda only: the list as a chunk table in device memory, needed when size > kInlineEntries.
  const EntryOf<Ref>* device_table = nullptr;
  uint32_t device_chunks = 0;
};

using TensorList = ListOf<TensorRef>;
using CastList = ListOf<CastRef>;

// grads *= inv_scale; found_inf = 1 if a product is not finite. Nothing is written to grads when
// inv_scale is 1.
//
// With a norm, that of grads * inv_scale, the products are multiplied by clip_coefficient(*norm,
// max_norm) before they are rounded to the dtype. When the norm is not finite, found_inf = 1; then,
// and when both factors are 1, grads are neither read nor written.
struct UnscaleArgs {
  TensorList grads;
  const float* inv_scale;
  float* found_inf;
  const float* norm;  // may be null
  float max_norm;
};

// found_inf = 1 if an element is not finite.
struct CheckFiniteArgs {
  TensorList grads;
  float* found_inf;
};

// output = input, rounded to nearest even into the output's dtype; by way of fp32 from fp64 to 16
// bits. Equal dtypes are copied bit by bit. No output overlaps another output or any input.
struct CastArgs {
  CastList casts;
};

// How a loss scale moves after a step. Pointers to one element each.
struct ScaleUpdate {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;  // overflows still to be tolerated; may be null when hysteresis is 1
  int64_t* skipped_steps;       // may be null
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  int32_t hysteresis;  // consecutive overflows before the scale backs off
  float min_scale;
  float max_scale;
};

// *norm = L2 norm of grads * inv_scale, norms[i] = that of tensor i alone, found_inf = 1 if a
// product is not finite.
struct GradNormArgs {
  TensorList grads;
  const float* inv_scale;  // may be null: 1
  float* found_inf;
  float* norm;
  float* norms;  // may be null
  // cpu: one for each chunk. cuda: kGradNormMaxBlocks, and one for each tensor if there are norms.
  double* partial_sums;
  uint32_t* tickets;  // cuda only: 0, and 0 again after the launch
};

constexpr int kGradNormMaxBlocks = 1024;

// The next loss scale, from the found_infs of all optimizers and devices.
struct UpdateScaleArgs {
  ScaleUpdate update;
  const float* const* found_infs;  // host array of pointers
  int64_t found_inf_count;
};

constexpr int kMaxFoundInfs = 2048;  // cuda: they travel in the kernel's parameters

// A batch of matrices in any layout: element (b, i, j) is
// data[b * batch_stride + i * row_stride + j * column_stride]. A stride of 0 repeats.
struct MatrixRef {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// A vector: element i is data[i * stride]. A stride of 0 repeats.
struct VectorRef {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;
};

// relu keeps NaN. gelu is x * Phi(x) by erf, gelu_tanh its approximation by tanh, as in torch.
enum class Activation : uint8_t { none, relu, gelu, gelu_tanh };

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
  // n, the sums of out's columns over rows and batch before they are rounded, in fp64 where a
  // product is, else in fp32; may be null
  void* column_sums;
};

struct GemmPlan;

namespace cuda {

using Stream = void*;  // a cudaStream_t

// Where a launch goes.
struct Target {
  int device = 0;  // its index; -1 for the host
  Stream stream = nullptr;
  int multiprocessors = 1;
  bool sm90 = false;  // runs code for sm_90a, and the build has it
};

Status launch_unscale(const UnscaleArgs&, const Target&);
Status launch_check_finite(const CheckFiniteArgs&, const Target&);
Status launch_grad_norm(const GradNormArgs&, const Target&);
Status launch_cast(const CastArgs&, const Target&);
Status launch_update_scale(const UpdateScaleArgs&, const Target&);

// The plan, of gemm/plan, is for these arguments; it says how large workspace and tickets are.
// Tickets: 0, and 0 again after the launch.
Status launch_gemm(const GemmArgs&, const GemmPlan&, void* workspace, uint32_t* tickets,
                   const Target&);

}  // namespace cuda

class Backend;

namespace cuda {
const Backend& backend();
}

namespace cpu {

// Calls body(context, begin, end) for ranges that partition [0, count), on several threads when
// count > grain.
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t count, int64_t grain, void* context, ParallelBody body);

// c = alpha * a @ b, or c += that when `accumulate`, row-major with leading dimensions; a is stored
// as k x m when `a_transposed`, b as n x k when `b_transposed`.
struct LibraryGemmArgs {
  const float* a;
  const float* b;
  float* c;
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t lda;
  int64_t ldb;
  int64_t ldc;
  bool a_transposed;
  bool b_transposed;
  bool accumulate;
  float alpha;
};

struct CpuContext {
  ParallelFor parallel_for;
  void (*library_gemm)(const LibraryGemmArgs&);
  float* (*workspace)(int64_t count);  // the calling thread's own, valid until its next call
};

// Whether the processor has instructions for products of bf16.
bool multiplies_bf16();

// Why torch's library is to compute a product, in a few words; null if launch_gemm is.
const char* gemm_obstacle(const GemmArgs&);

Status launch_unscale(const UnscaleArgs&, const CpuContext&);
Status launch_check_finite(const CheckFiniteArgs&, const CpuContext&);
Status launch_grad_norm(const GradNormArgs&, const CpuContext&);
Status launch_cast(const CastArgs&, const CpuContext&);
Status launch_update_scale(const UpdateScaleArgs&, const CpuContext&);
Status launch_gemm(const GemmArgs&, const CpuContext&);

}  // namespace cpu

}  // namespace amp_ext
