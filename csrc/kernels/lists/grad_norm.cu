// grad_norm: the L2 norm of grads * inv_scale, with the finiteness check. One launch only reads the
// gradients.
//
// Each block stores an fp64 sum of squares for its part of the list. The block with the last ticket
// adds the sums in order. The grid depends only on the list and the device, so results are bitwise
// equal in every run.
#include "foreach.cuh"
#include "reduce.cuh"

namespace amp_ext {
namespace {

struct Shared {
  BlockSum<kForeachThreads> sum;
  bool last;
};

// The least fp32 sum of squares that is as exact as its additions. Subnormal squares are each off
// by 2^-150 at most, and those of a batch together by 2^-29 of this sum.
constexpr float kLeastSum = 0x1p-116f;

// Sums `size` numbers of one sign pairwise, with log2(size) roundings. The input is overwritten.
template <int kSize>
__device__ float sum_by_pairs(float (&values)[kSize]) {
#pragma unroll
  for (int half = kSize / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  return values[0];
}

template <class T, int kPacks>
__device__ bool all_zero(const uint4 (&bits)[kPacks]) {
  uint32_t some = 0;
#pragma unroll
  for (const uint4& b : bits) some |= b.x | b.y | b.z | b.w;
  return (some & (sizeof(T) == 4 ? 0x7fffffffu : 0x7fff7fffu)) == 0;
}

// Sums the squares of scaled elements: a batch in fp32, the batches in fp64. Batches outside fp32's
// range are summed in fp64.
struct SumSquares {
  float inv_scale;
  double sum = 0;

  template <class T>
  __device__ void visit(const ForeachSpan& span, T* data) {
    const auto single = [&](const T* at) { add(*at); };
    if constexpr (std::is_same_v<T, double>) {
      for_each_batch(
          span, data, [&](const T* at, const auto& bits) { add_packs<T>(bits); }, single);
    } else {
      for_each_batch(
          span, data, [&](const T* at, const auto& bits) { add_batch(at, bits); }, single);
    }
  }

 private:
  template <class T>
  __device__ auto product(T x) const {
    using E = Element<T>;
    return E::widen(x) * static_cast<typename E::Compute>(inv_scale);
  }

  template <class T>
  __device__ void add(T x) {
    const auto p = product(x);
    sum += static_cast<double>(p) * static_cast<double>(p);
  }

  template <class T, int kPacks>
  __device__ void add_packs(const uint4 (&bits)[kPacks]) {
#pragma unroll
    for (const uint4& b : bits) {
      const Pack<T> pack = Pack<T>::from(b);
#pragma unroll
      for (const T x : pack.at) add(x);
    }
  }

  template <class T, int kPacks>
  __device__ void add_batch(const T* at, const uint4 (&bits)[kPacks]) {
    const float squares = fp32_sum<T>(bits);
    if (squares >= kLeastSum && Element<float>::finite(squares)) {
      sum += static_cast<double>(squares);
    } else if (squares != 0 || !all_zero<T>(bits)) {
      add_again<kPacks>(at);
    }
  }

  template <class T, int kPacks>
  __device__ float fp32_sum(const uint4 (&bits)[kPacks]) const {
    constexpr int kSize = Pack<T>::kSize;
    float sums[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const Pack<T> pack = Pack<T>::from(bits[k]);
      float pairs[kSize / 2];
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) {
        const float a = product(pack.at[2 * i]), b = product(pack.at[2 * i + 1]);
        pairs[i] = fmaf(a, a, b * b);
      }
      sums[k] = sum_by_pairs(pairs);
    }
    return sum_by_pairs(sums);
  }

  // Sums a batch again in fp64. The batch is read anew: the case is rare, and registers are scarce.
  template <int kPacks, class T>
  __device__ void add_again(const T* at) {
    constexpr int kSize = Pack<T>::kSize;
#pragma unroll 1
    for (int i = 0; i < kPacks * kSize; ++i)
      add(at[i / kSize * kForeachThreads * kSize + i % kSize]);
  }
};

template <class Table>
__global__ __launch_bounds__(kForeachThreads, kForeachBlocksPerSm) void grad_norm_kernel(
    const Table __grid_constant__ table, const float* inv_scale, float* found_inf, float* norm,
    double* partial_sums, uint32_t* tickets) {
  begin_grid();
  auto& shared = ptx::shared<Shared>();
  SumSquares body{inv_scale ? *inv_scale : 1.0f};
  visit_spans(table, body);
  const double sum = block_sum(body.sum, shared.sum);
  if (threadIdx.x == 0) partial_sums[blockIdx.x] = sum;
  if (!is_last_block(tickets, gridDim.x, shared.last)) return;

  double mine = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += kForeachThreads)
    mine += ptx::load_l2(&partial_sums[i]);
  const double total = block_sum(mine, shared.sum);
  if (threadIdx.x != 0) return;
  *norm = static_cast<float>(sqrt(total));  // not finite if a product is not
  if (!Element<float>::finite(*norm)) ptx::store_any(found_inf, 1.0f);
}

}  // namespace

Status cuda::CudaBackend::grad_norm(const GradNormArgs& args, Services& services) const {
  auto* const partial_sums =
      static_cast<double*>(services.scratch(kGradNormMaxBlocks * sizeof(double)));
  uint32_t* const tickets = services.tickets(1);
  return launch_list(args.grads, services, [&](const auto& table, const Target& target) {
    using Table = std::decay_t<decltype(table)>;
    const int blocks = std::clamp(foreach_blocks(table.chunks, target), 1, kGradNormMaxBlocks);
    return launch(grad_norm_kernel<Table>, blocks, kForeachThreads, sizeof(Shared), target.stream,
                  table, args.inv_scale, args.found_inf, args.norm, partial_sums, tickets);
  });
}

}  // namespace amp_ext
