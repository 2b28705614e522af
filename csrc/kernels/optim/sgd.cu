// sgd_: one update of every parameter by SGD with momentum, in one launch.
#include "optim/update.cuh"

namespace amp_ext {
namespace {

template <bool kPlain>
struct SgdChunk {
  using Tensor = ChunkOf<kPlain>;
  Tensor param, grad, momentum;
  ChunkOf<false> copy;
  const SgdFactors& factors;
  Rounding rounding;

  __device__ SgdChunk(const UpdateRef& e, int64_t offset, const SgdFactors& factors,
                      Rounding rounding)
      : param(e.param, e.param_dtype, offset),
        grad(e.grad, e.grad_dtype, offset),
        momentum(e.exp_avg, e.exp_avg_dtype, offset),
        copy(e.copy, e.copy_dtype, offset),
        factors(factors),
        rounding(rounding) {}

  __device__ bool is_plain() const {
    return param.is_plain() && grad.is_plain() && momentum.is_plain();
  }

  template <int kSize>
  __device__ void visit(int i) const {
    const uint4 param_bits = param.template load<kSize>(i);
    const uint4 grad_bits = grad.template load<kSize>(i);
    uint4 momentum_bits{};
    if (momentum.data) momentum_bits = momentum.template load<kSize>(i);
    uint4 copy_bits{};
    if (copy.data) copy_bits = copy.load<kSize>(i);

    float p[kSize], g[kSize];
    param.widen(param_bits, p);
    if (copy.data) copy.replace_stale(copy_bits, p);
    grad.widen(grad_bits, g);
#pragma unroll
    for (int j = 0; j < kSize; ++j) g[j] = used_gradient(factors, g[j], p[j]);
    if (momentum.data) {
      float m[kSize];
      momentum.widen(momentum_bits, m);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        m[j] = next_momentum(factors, m[j], g[j]);
        g[j] = with_lookahead(factors, m[j], g[j]);
      }
      momentum.store_state(i, m, rounding, 0, 16);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) p[j] = next_param(factors, p[j], g[j]);
    param.store_state(i, p, rounding, 0, 0);
    if (copy.data) copy.store_nearest(i, p);
  }
};

struct Sgd {
  template <class Table>
  static constexpr int kBlocksPerSm = kUpdateBlocksPerSm;

  using Factors = SgdFactors;
  SgdOptions options;

  __device__ Factors factors(const StepFactors& step, uint32_t number) const {
    return sgd_factors(options, step, /*is_first=*/number == 1);
  }
  __device__ void update(const UpdateRef& entry, const UpdateSpan& span, const Factors& factors,
                         Rounding rounding) const {
    const SgdChunk<true> plain(entry, span.offset, factors, rounding);
    if (plain.is_plain()) {
      update_span(plain, span);
    } else {
      update_span(SgdChunk<false>(entry, span.offset, factors, rounding), span);
    }
  }
};

template <class Table>
__global__ __launch_bounds__(kUpdateThreads, Sgd::kBlocksPerSm<Table>) void sgd_kernel(
    const Table __grid_constant__ table, const Sgd __grid_constant__ op,
    const StepScalars __grid_constant__ scalars, uint32_t* tickets) {
  update_list(op, table, scalars, tickets);
}

}  // namespace

Status cuda::CudaBackend::sgd(const SgdArgs& args, Services& services) const {
  return launch_update(args.list, Sgd{args.options}, args.scalars, services,
                       [](const auto& table) { return sgd_kernel<std::decay_t<decltype(table)>>; });
}

}  // namespace amp_ext
