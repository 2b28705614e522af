// grad_norm: the L2 norm of grads * inv_scale, also tensor by tensor, and the finiteness check:
// read-only on the gradients, one launch.
//
// Each block leaves an fp64 sum of squares for the part of a tensor, or of the list, that it has
// read; the block that draws the last ticket adds them up in order. The grid depends on the list
// and the device alone, so the result is bitwise the same in every run.
#include "foreach.cuh"
#include "reduce.cuh"

namespace amp_ext {
namespace {

struct Shared {
  BlockSum<kForeachThreads> sum;
  bool last;
};

struct SumSquares {
  float inv_scale;
  double sum = 0;
  bool bad = false;

  template <class T>
  __device__ void visit(int, T* data, int n) {
    using E = Element<T>;
    using Compute = typename E::Compute;
    for_each_element<false>(data, n, [&](T x) {
      const Compute product = E::widen(x) * static_cast<Compute>(inv_scale);
      bad |= !Element<Compute>::finite(product);
      sum += static_cast<double>(product) * static_cast<double>(product);
      return x;
    });
  }
};

// The sums of a block's parts of tensors. The pairs (block, tensor) that have one, in order, grow
// in one number or in both, so block + tensor is a slot of its own for each.
struct SumSquaresPerTensor : SumSquares {
  double* partial_sums;
  BlockSum<kForeachThreads>& shared;
  int tensor = -1;

  __device__ SumSquaresPerTensor(float inv_scale, double* partial_sums,
                                 BlockSum<kForeachThreads>& shared)
      : SumSquares{inv_scale}, partial_sums(partial_sums), shared(shared) {}

  template <class T>
  __device__ void visit(int i, T* data, int n) {
    if (i != tensor) finish();
    tensor = i;
    SumSquares::visit(i, data, n);
  }

  // All threads of the block take part.
  __device__ void finish() {
    if (tensor < 0) return;
    const double total = block_sum(sum, shared);
    if (threadIdx.x == 0) partial_sums[blockIdx.x + tensor] = total;
    ptx::block_sync();
    sum = 0;
  }
};

// What this thread adds to the norm of the list; its warp's share of norms is written.
template <class Table>
__device__ double finish_norms(const Table& table, const double* partial_sums, float* norms) {
  const Shares shares(table.chunks);
  const ChunkEntry* entries = table.entries();
  const int lane = threadIdx.x % 32;
  double mine = 0;
  for (int i = threadIdx.x / 32; i < table.size; i += kForeachThreads / 32) {
    const uint32_t begin = entries[i].first_chunk;
    const uint32_t end = i + 1 < table.size ? entries[i + 1].first_chunk : table.chunks;
    double sum = 0;
    if (begin < end) {
      const uint32_t last = shares.block_of(end - 1);
      for (uint32_t block = shares.block_of(begin) + lane; block <= last; block += 32)
        sum += ptx::load_l2(&partial_sums[block + i]);
    }
    sum = warp_sum(sum);
    if (lane == 0) norms[i] = static_cast<float>(sqrt(sum));
    if (lane == 0) mine += sum;
  }
  return mine;
}

template <class Table, bool kPerTensor>
__global__ __launch_bounds__(kForeachThreads, kForeachBlocksPerSm) void grad_norm_kernel(
    const Table __grid_constant__ table, const float* inv_scale, float* found_inf, float* norm,
    float* norms, double* partial_sums, uint32_t* tickets) {
  auto& shared = ptx::shared<Shared>();
  const float factor = inv_scale ? *inv_scale : 1.0f;
  bool bad = false;
  if constexpr (kPerTensor) {
    SumSquaresPerTensor body(factor, partial_sums, shared.sum);
    visit_chunks(table, body);
    body.finish();
    bad = body.bad;
  } else {
    SumSquares body{factor};
    visit_chunks(table, body);
    const double sum = block_sum(body.sum, shared.sum);
    if (threadIdx.x == 0) partial_sums[blockIdx.x] = sum;
    bad = body.bad;
  }
  if (ptx::block_any(bad) && threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);
  if (!is_last_block(tickets, gridDim.x, shared.last)) return;

  double mine = 0;
  if constexpr (kPerTensor) {
    mine = finish_norms(table, partial_sums, norms);
  } else {
    for (int i = threadIdx.x; i < gridDim.x; i += kForeachThreads)
      mine += ptx::load_l2(&partial_sums[i]);
  }
  const double total = block_sum(mine, shared.sum);
  if (threadIdx.x != 0) return;
  *norm = static_cast<float>(sqrt(total));
  if (!Element<float>::finite(*norm)) ptx::store_any(found_inf, 1.0f);
}

}  // namespace

Status cuda::CudaBackend::grad_norm(const GradNormArgs& args, Services& services) const {
  auto* const partial_sums =
      static_cast<double*>(services.scratch(partial_sum_count(args) * sizeof(double)));
  uint32_t* const tickets = services.tickets(1);
  return launch_list(args.grads, services, [&](const auto& table, const Target& target) {
    using Table = std::decay_t<decltype(table)>;
    const int blocks = std::clamp(foreach_blocks(table.chunks, target), 1, kGradNormMaxBlocks);
    const auto kernel = args.norms ? grad_norm_kernel<Table, true> : grad_norm_kernel<Table, false>;
    return launch(kernel, blocks, kForeachThreads, sizeof(Shared), target.stream, table,
                  args.inv_scale, args.found_inf, args.norm, args.norms, partial_sums, tickets);
  });
}

}  // namespace amp_ext
