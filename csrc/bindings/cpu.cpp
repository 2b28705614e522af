// The CPU backend: torch's threads, no streams.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>

#include <array>
#include <memory>

#include "backend.h"
#include "ops.h"

namespace amp_ext {
namespace {

void parallel_for(int64_t count, int64_t grain, void* context, cpu::ParallelBody body) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

// The library is torch's own matrix product.
void library_gemm(const cpu::LibraryGemmArgs& g) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto matrix = [](const float* data, int64_t rows, int64_t columns, int64_t ld,
                         bool transposed) {
    const std::array<int64_t, 2> strides{transposed ? 1 : ld, transposed ? ld : 1};
    return at::from_blob(const_cast<float*>(data), {rows, columns}, strides, at::kFloat);
  };
  const at::Tensor a = matrix(g.a, g.m, g.k, g.lda, g.a_transposed);
  const at::Tensor b = matrix(g.b, g.k, g.n, g.ldb, g.b_transposed);
  at::Tensor c = matrix(g.c, g.m, g.n, g.ldc, false);
  if (g.accumulate || g.alpha != 1) {
    at::addmm_out(c, c, a, b, g.accumulate ? 1 : 0, g.alpha);
  } else {
    at::mm_out(c, a, b);
  }
}

// Kept between calls: fresh memory would be mapped and cleared page by page every time.
float* workspace(int64_t count) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (count > size) {
    size = 0;
    memory.reset();
    memory.reset(new float[count]);  // may throw
    size = count;
  }
  return memory.get();
}

constexpr cpu::CpuContext kContext{parallel_for, library_gemm, workspace};

void check(const char* op, Status status) {
  TORCH_CHECK(status == Status::ok, op, ": ", text(status));
}

class TorchThreads final : public Backend {
 public:
  void unscale(UnscaleArgs args, c10::Device) const override {
    check("amp_ext::unscale_", cpu::launch_unscale(args, kContext));
  }
  void check_finite(CheckFiniteArgs args, c10::Device) const override {
    check("amp_ext::check_finite", cpu::launch_check_finite(args, kContext));
  }
  void grad_norm(GradNormArgs args, c10::Device) const override {
    int64_t chunks = 0;
    for (int64_t i = 0; i < args.grads.size; ++i) chunks += chunk_count(args.grads.refs[i].numel);
    const std::unique_ptr<double[]> sums(new double[chunks]);
    args.partial_sums = sums.get();
    check("amp_ext::grad_norm", cpu::launch_grad_norm(args, kContext));
  }
  void cast(CastArgs args, c10::Device) const override {
    check("amp_ext::cast_", cpu::launch_cast(args, kContext));
  }
  void update_scale(UpdateScaleArgs args, c10::Device) const override {
    check("amp_ext::update_scale_", cpu::launch_update_scale(args, kContext));
  }
  void gemm(const char* op, const GemmArgs& args, c10::Device) const override {
    check(op, cpu::launch_gemm(args, kContext));
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const TorchThreads backend;
  return backend;
}

TORCH_LIBRARY_IMPL(amp_ext, CPU, m) { register_ops(m); }

// Sparse tensors reach the ops' checks, whose errors name the argument.
TORCH_LIBRARY_IMPL(amp_ext, SparseCPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCUDA, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCsrCPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCsrCUDA, m) { register_ops(m); }

}  // namespace amp_ext
