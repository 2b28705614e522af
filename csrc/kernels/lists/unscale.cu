// unscale_: grads *= inv_scale in place, clipped to a given norm, in one launch. Sets found_inf = 1
// if a rounded product is not finite.
#include "amp_ext/scale.h"
#include "foreach.cuh"

namespace amp_ext {
namespace {

struct Unscale {
  float inv_scale, coefficient = 1;
  bool bad = false;

  __device__ bool changes_nothing() const { return inv_scale == 1.0f && coefficient == 1.0f; }

  template <class T>
  __device__ void visit(const ForeachSpan& span, T* data) {
    using E = Element<T>;
    using Compute = typename E::Compute;
    if (changes_nothing()) {
      for_each_element<false>(span, data, [&](T x) { return bad |= !E::finite(x), x; });
    } else {
      for_each_element<true>(span, data, [&](T x) {
        const T product = E::round(E::widen(x) * static_cast<Compute>(inv_scale) *
                                   static_cast<Compute>(coefficient));
        bad |= !E::finite(product);
        return product;
      });
    }
  }
};

template <class Table>
__global__ __launch_bounds__(kForeachThreads, kForeachBlocksPerSm) void unscale_kernel(
    const Table __grid_constant__ table, const float* inv_scale, const float* norm, float max_norm,
    float* found_inf) {
  begin_grid();
  Unscale body{*inv_scale};
  if (norm) {
    // Every block decides by the norm alone, because blocks change found_inf meanwhile.
    if (!Element<float>::finite(*norm)) {
      if (threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);
      return;
    }
    body.coefficient = clip_coefficient(*norm, max_norm);
    if (body.changes_nothing()) return;
  }
  visit_spans(table, body);
  if (ptx::block_any(body.bad) && threadIdx.x == 0) ptx::store_any(found_inf, 1.0f);
}

}  // namespace

Status cuda::CudaBackend::unscale(const UnscaleArgs& args, Services& services) const {
  return launch_list(args.grads, services, [&](const auto& table, const Target& target) {
    if (table.chunks == 0 && !args.norm) return Status::ok;
    const int blocks = foreach_blocks(table.chunks, target);
    return launch(unscale_kernel<std::decay_t<decltype(table)>>, std::max(blocks, 1),
                  kForeachThreads, 0, target.stream, table, args.inv_scale, args.norm,
                  args.max_norm, args.found_inf);
  });
}

}  // namespace amp_ext
