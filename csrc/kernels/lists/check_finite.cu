// check_finite: found_inf = 1 if an element is not finite, by one read-only launch.
#include "foreach.cuh"

namespace amp_ext {
namespace {

struct CheckFinite {
  bool bad = false;

  template <class T>
  __device__ void visit(const ForeachSpan& span, T* data) {
    for_each_element<false>(span, data, [&](T x) { return bad |= !Element<T>::finite(x), x; });
  }
};

template <class Table>
__global__ __launch_bounds__(kForeachThreads, kForeachBlocksPerSm) void check_finite_kernel(
    const Table __grid_constant__ table, float* found_inf) {
  begin_grid();
  CheckFinite body;
  visit_spans(table, body);
  if (ptx::block_any(body.bad) && threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);
}

}  // namespace

Status cuda::CudaBackend::check_finite(const CheckFiniteArgs& args, Services& services) const {
  return launch_list(args.grads, services, [&](const auto& table, const Target& target) {
    if (table.chunks == 0) return Status::ok;
    const int blocks = foreach_blocks(table.chunks, target);
    return launch(check_finite_kernel<std::decay_t<decltype(table)>>, blocks, kForeachThreads, 0,
                  target.stream, table, args.found_inf);
  });
}

}  // namespace amp_ext
