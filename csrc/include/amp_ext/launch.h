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

// A list of tensors. `tensors` is host memory for both backends.
struct TensorList {
  const TensorRef* tensors = nullptr;
  int64_t size = 0;
  // cuda only: the list as a chunk table in device memory, needed when size > kInlineTensors.
  const ChunkEntry* device_table = nullptr;
  uint32_t device_chunks = 0;
};

// grads *= inv_scale; found_inf = 1 if a product is not finite. Nothing is written to grads when
// inv_scale is 1.
struct UnscaleArgs {
  TensorList grads;
  const float* inv_scale;
  float* found_inf;
};

// found_inf = 1 and *bad_tensor = index of a non-finite tensor, if there is one.
struct CheckFiniteArgs {
  TensorList grads;
  float* found_inf;
  int64_t* bad_tensor;  // may be null
};

// *norm = L2 norm of grads * inv_scale, found_inf = 1 if a product is not finite.
struct GradNormArgs {
  TensorList grads;
  const float* inv_scale;  // may be null: 1
  float* found_inf;
  float* norm;
  void* workspace;  // cpu: a double for each chunk of kChunkElements; cuda:
                    // kGradNormWorkspaceBytes, zeroed
};

constexpr int kGradNormMaxBlocks = 1024;
constexpr int kGradNormWorkspaceBytes =
    kGradNormMaxBlocks * 8 + 8;  // a double per block, then the ticket

// The next loss scale, from the found_infs of all optimizers and devices.
struct UpdateScaleArgs {
  float* scale;
  int32_t* growth_tracker;
  int32_t* hysteresis_tracker;  // overflows still to be tolerated; may be null when hysteresis is 1
  int64_t* skipped_steps;       // may be null
  const float* const* found_infs;  // host array of pointers
  int64_t found_inf_count;
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  int32_t hysteresis;  // consecutive overflows before the scale backs off
  float min_scale;
  float max_scale;
};

constexpr int kMaxFoundInfs = 2048;  // cuda: they travel in the kernel's parameters

namespace cuda {

using Stream = void*;  // a cudaStream_t

Status launch_unscale(const UnscaleArgs&, Stream);
Status launch_check_finite(const CheckFiniteArgs&, Stream);
Status launch_grad_norm(const GradNormArgs&, Stream);
Status launch_update_scale(const UpdateScaleArgs&, Stream);

}  // namespace cuda

namespace cpu {

// Calls body(context, begin, end) for ranges that partition [0, count), on several threads when
// count > grain.
using ParallelBody = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t count, int64_t grain, void* context, ParallelBody body);

struct CpuContext {
  ParallelFor parallel_for;
};

Status launch_unscale(const UnscaleArgs&, const CpuContext&);
Status launch_check_finite(const CheckFiniteArgs&, const CpuContext&);
Status launch_grad_norm(const GradNormArgs&, const CpuContext&);
Status launch_update_scale(const UpdateScaleArgs&, const CpuContext&);

}  // namespace cpu

}  // namespace amp_ext
