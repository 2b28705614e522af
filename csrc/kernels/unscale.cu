// unscale_: grads *= inv_scale in place, and found_inf = 1 if a rounded product is not finite. One
// launch.
#include "foreach.cuh"

namespace amp_ext {
namespace {

struct Unscale {
  float inv_scale;
  bool bad = false;

  template <class T>
  __device__ void visit(int, T* data, int n) {
    using E = Element<T>;
    if (inv_scale == 1.0f) {
      for_each_element<false>(data, n, [&](T x) { return bad |= !E::finite(x), x; });
    } else {
      for_each_element<true>(data, n, [&](T x) {
        const T product = E::round(E::widen(x) * static_cast<typename E::Compute>(inv_scale));
        bad |= !E::finite(product);
        return product;
      });
    }
  }
};

template <class Table>
__global__ __launch_bounds__(kForeachThreads, kForeachBlocksPerSm) void unscale_kernel(
    const Table __grid_constant__ table, const float* inv_scale, float* found_inf) {
  Unscale body{*inv_scale};
  visit_chunks(table, body);
  if (ptx::block_any(body.bad) && threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);
}

}  // namespace

Status cuda::launch_unscale(const UnscaleArgs& args, Stream stream) {
  return with_table(args.grads, [&](const auto& table) {
    if (table.chunks == 0) return Status::ok;
    int blocks = 0;
    if (const Status s = foreach_blocks(table.chunks, &blocks); s != Status::ok) return s;
    return launch(unscale_kernel<std::decay_t<decltype(table)>>, blocks, kForeachThreads, 0, stream,
                  table, args.inv_scale, args.found_inf);
  });
}

}  // namespace amp_ext
