// The memory of an op's arguments: the bytes that its kernels may access.
#pragma once

#include "amp_ext/backend.h"
#include "runtime.h"

namespace ptx_backend {

using namespace amp_ext;

template <class T>
void allow(const T* scalar, int64_t count = 1) {
  allow_memory(scalar, count * static_cast<int64_t>(sizeof(T)));
}

inline void allow(const void* data, DType dtype, int64_t count) {
  allow_memory(data, count * size_of(dtype));
}

inline void allow(const TensorList& list) {
  for (int64_t i = 0; i < list.size; ++i)
    allow(list.refs[i].data, list.refs[i].dtype, list.refs[i].numel);
}

inline void allow(const UpdateList& list) {
  for (int64_t i = 0; i < list.size; ++i) {
    const UpdateRef& t = list.refs[i];
    allow(t.param, t.param_dtype, t.numel);
    allow(t.grad, t.grad_dtype, t.numel);
    allow(t.exp_avg, t.exp_avg_dtype, t.numel);
    allow(t.exp_avg_sq, t.exp_avg_sq_dtype, t.numel);
    allow(t.max_exp_avg_sq, t.exp_avg_sq_dtype, t.numel);
    allow(t.copy, t.copy_dtype, t.numel);
    allow(t.step);
  }
}

inline void allow(const StepScalars& s) {
  allow(s.lr), allow(s.found_inf), allow(s.inv_scale), allow(s.norm);
}

inline void allow(const MatrixRef& x, int64_t batch, int64_t rows, int64_t columns) {
  if (batch <= 0 || rows <= 0 || columns <= 0) return;
  const int64_t last =
      (batch - 1) * x.batch_stride + (rows - 1) * x.row_stride + (columns - 1) * x.column_stride;
  allow(x.data, x.dtype, last + 1);
}

inline void allow(const UnscaleArgs& args) {
  allow(args.grads), allow(args.inv_scale), allow(args.found_inf), allow(args.norm);
}

inline void allow(const CheckFiniteArgs& args) { allow(args.grads), allow(args.found_inf); }

inline void allow(const GradNormArgs& args) {
  allow(args.grads), allow(args.inv_scale), allow(args.found_inf), allow(args.norm);
  allow(args.norms, args.grads.size);
}

inline void allow(const CastArgs& args) {
  for (int64_t i = 0; i < args.casts.size; ++i) {
    const CastRef& t = args.casts.refs[i];
    allow(t.output, t.output_dtype, t.numel), allow(t.input, t.input_dtype, t.numel);
  }
}

inline void allow(const UpdateScaleArgs& args) {
  const ScaleUpdate& u = args.update;
  allow(u.scale), allow(u.growth_tracker), allow(u.hysteresis_tracker), allow(u.skipped_steps);
  allow(u.next_step, NextStep::kSize);
  for (int64_t i = 0; i < args.found_inf_count; ++i) allow(args.found_infs[i]);
}

inline void allow(const AdamArgs& args) { allow(args.list), allow(args.scalars); }
inline void allow(const SgdArgs& args) { allow(args.list), allow(args.scalars); }

inline void allow(const GemmArgs& g) {
  const int64_t matrices = g.batch * g.terms;
  allow(g.a, matrices, g.m, g.k), allow(g.b, matrices, g.k, g.n);
  for (const MatrixRef* x : {&g.c, &g.out}) allow(*x, g.batch, g.m, g.n);
  if (g.n > 0) allow(g.bias.data, g.bias.dtype, (g.n - 1) * g.bias.stride + 1);
}

}  // namespace ptx_backend
