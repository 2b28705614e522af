// grad_norm: the L2 norm of grads * inv_scale and the finiteness check, read-only, in one launch.
//
// Each block writes one fp64 partial sum; the block that draws the last ticket adds them up in
// order. The grid depends on the list and the device alone, so the result is bitwise the same in
// every run.
#include "foreach.cuh"
#include "reduce.cuh"

namespace amp_ext {
namespace {

struct Workspace {
  double partial[kGradNormMaxBlocks];
  uint32_t ticket;
};

static_assert(sizeof(Workspace) <= kGradNormWorkspaceBytes);

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

struct Shared {
  BlockSum<kForeachThreads> sum;
  bool last;
};

template <class Table>
__global__ __launch_bounds__(kForeachThreads, kForeachBlocksPerSm) void grad_norm_kernel(
    const Table __grid_constant__ table, const float* inv_scale, float* found_inf, float* norm,
    Workspace* workspace) {
  auto& shared = ptx::shared<Shared>();
  SumSquares body{inv_scale ? *inv_scale : 1.0f};
  visit_chunks(table, body);
  if (ptx::block_any(body.bad) && threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);

  const double partial = block_sum(body.sum, shared.sum);
  if (threadIdx.x == 0) {
    workspace->partial[blockIdx.x] = partial;
    ptx::device_fence();
    shared.last = ptx::ticket(&workspace->ticket, gridDim.x - 1) == gridDim.x - 1;
    ptx::device_fence();
  }
  ptx::block_sync();
  if (!shared.last) return;

  double mine = 0;
  for (int i = threadIdx.x; i < gridDim.x; i += kForeachThreads)
    mine += ptx::load_l2(&workspace->partial[i]);
  const double total = block_sum(mine, shared.sum);
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(total));
}

}  // namespace

Status cuda::launch_grad_norm(const GradNormArgs& args, Stream stream) {
  return with_table(args.grads, [&](const auto& table) {
    int blocks = 0;
    if (const Status s = foreach_blocks(table.chunks, &blocks); s != Status::ok) return s;
    blocks = std::clamp(blocks, 1, kGradNormMaxBlocks);
    return launch(grad_norm_kernel<std::decay_t<decltype(table)>>, blocks, kForeachThreads,
                  sizeof(Shared), stream, table, args.inv_scale, args.found_inf, args.norm,
                  static_cast<Workspace*>(args.workspace));
  });
}

}  // namespace amp_ext
