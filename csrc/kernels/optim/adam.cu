// adam_: one update of every parameter by Adam, AdamW or AMSGrad, in one launch.
#include "optim/update.cuh"

namespace amp_ext {
namespace {

template <bool kPlain>
struct AdamChunk {
  using Tensor = ChunkOf<kPlain>;
  Tensor param, grad, exp_avg, exp_avg_sq, largest;
  ChunkOf<false> copy;
  const AdamFactors& factors;
  Rounding rounding;

  __device__ AdamChunk(const UpdateRef& e, int64_t offset, const AdamFactors& factors,
                       Rounding rounding)
      : param(e.param, e.param_dtype, offset),
        grad(e.grad, e.grad_dtype, offset),
        exp_avg(e.exp_avg, e.exp_avg_dtype, offset),
        exp_avg_sq(e.exp_avg_sq, e.exp_avg_sq_dtype, offset),
        largest(e.max_exp_avg_sq, e.exp_avg_sq_dtype, offset),
        copy(e.copy, e.copy_dtype, offset),
        factors(factors),
        rounding(rounding) {}

  __device__ bool is_plain() const {
    return param.is_plain() && grad.is_plain() && exp_avg.is_plain() && exp_avg_sq.is_plain() &&
           largest.is_plain();
  }

  template <int kSize>
  __device__ void visit(int i) const {
    const uint4 param_bits = param.template load<kSize>(i);
    const uint4 grad_bits = grad.template load<kSize>(i);
    const uint4 first_bits = exp_avg.template load<kSize>(i);
    const uint4 second_bits = exp_avg_sq.template load<kSize>(i);
    uint4 largest_bits{};
    if (largest.data) largest_bits = largest.template load<kSize>(i);
    uint4 copy_bits{};
    if (copy.data) copy_bits = copy.load<kSize>(i);

    float p[kSize], g[kSize], first[kSize], second[kSize];
    param.widen(param_bits, p);
    if (copy.data) copy.replace_stale(copy_bits, p);
    grad.widen(grad_bits, g);
    exp_avg.widen(first_bits, first);
    exp_avg_sq.widen(second_bits, second);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      g[j] = used_gradient(factors, g[j], p[j]);
      first[j] = next_exp_avg(factors, first[j], g[j]);
      second[j] = next_exp_avg_sq(factors, second[j], g[j]);
    }
    exp_avg.store_state(i, first, rounding, 0, 16);
    exp_avg_sq.store_state(i, second, rounding, 1, 0);
    if (largest.data) {
      float most[kSize];
      largest.widen(largest_bits, most);
#pragma unroll
      for (int j = 0; j < kSize; ++j) second[j] = larger(most[j], second[j]);
      largest.store_state(i, second, rounding, 1, 16);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) p[j] = next_param(factors, p[j], first[j], second[j]);
    param.store_state(i, p, rounding, 0, 0);
    if (copy.data) copy.store_nearest(i, p);
  }
};

struct Adam {
  // Entries in device memory take more registers than four blocks leave.
  template <class Table>
  static constexpr int kBlocksPerSm =
      std::is_same_v<Table, DeviceTable<UpdateRef>> ? 3 : kUpdateBlocksPerSm;

  using Factors = AdamFactors;
  AdamOptions options;

  __device__ Factors factors(const StepFactors& step, uint32_t number) const {
    return adam_factors(options, step, number);
  }
  __device__ void update(const UpdateRef& entry, const UpdateSpan& span, const Factors& factors,
                         Rounding rounding) const {
    const AdamChunk<true> plain(entry, span.offset, factors, rounding);
    if (plain.is_plain()) {
      update_span(plain, span);
    } else {
      update_span(AdamChunk<false>(entry, span.offset, factors, rounding), span);
    }
  }
};

template <class Table>
__global__ __launch_bounds__(kUpdateThreads, Adam::kBlocksPerSm<Table>) void adam_kernel(
    const Table __grid_constant__ table, const Adam __grid_constant__ op,
    const StepScalars __grid_constant__ scalars, uint32_t* tickets) {
  update_list(op, table, scalars, tickets);
}

}  // namespace

Status cuda::CudaBackend::adam(const AdamArgs& args, Services& services) const {
  return launch_update(
      args.list, Adam{args.options}, args.scalars, services,
      [](const auto& table) { return adam_kernel<std::decay_t<decltype(table)>>; });
}

}  // namespace amp_ext
