// check_finite: found_inf = 1 if an element is not finite, and the index of a tensor that holds
// one. Read-only, one launch.
#include "foreach.cuh"

namespace amp_ext {
namespace {

struct CheckFinite {
  int bad_tensor = -1;

  template <class T>
  __device__ void visit(int tensor, T* data, int n) {
    bool bad = false;
    for_each_element<false>(data, n, [&](T x) { return bad |= !Element<T>::finite(x), x; });
    if (bad) bad_tensor = tensor;
  }
};

template <class Table>
__global__ __launch_bounds__(kForeachThreads, kForeachBlocksPerSm) void check_finite_kernel(
    const Table __grid_constant__ table, float* found_inf, int64_t* bad_tensor) {
  CheckFinite body;
  visit_chunks(table, body);
  if (bad_tensor && body.bad_tensor >= 0) ptx::store_any(bad_tensor, body.bad_tensor);
  if (ptx::block_any(body.bad_tensor >= 0) && threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);
}

}  // namespace

Status cuda::launch_check_finite(const CheckFiniteArgs& args, const Target& target) {
  return with_table(args.grads, [&](const auto& table) {
    if (table.chunks == 0) return Status::ok;
    const int blocks = foreach_blocks(table.chunks, target);
    return launch(check_finite_kernel<std::decay_t<decltype(table)>>, blocks, kForeachThreads, 0,
                  target.stream, table, args.found_inf, args.bad_tensor);
  });
}

}  // namespace amp_ext
