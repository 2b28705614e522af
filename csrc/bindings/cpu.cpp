// The CPU backend: torch's threads, no streams.
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <memory>

#include "backend.h"
#include "ops.h"

namespace amp_ext {
namespace {

void parallel_for(int64_t count, int64_t grain, void* context, cpu::ParallelBody body) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { body(context, begin, end); });
}

constexpr cpu::CpuContext kContext{parallel_for};

void check(const char* op, Status status) {
  TORCH_CHECK(status == Status::ok, op, ": ", text(status));
}

class CpuBackend final : public Backend {
 public:
  void unscale(UnscaleArgs args, c10::Device) const override {
    check("amp_ext::unscale_", cpu::launch_unscale(args, kContext));
  }
  void check_finite(CheckFiniteArgs args, c10::Device) const override {
    check("amp_ext::check_finite", cpu::launch_check_finite(args, kContext));
  }
  void grad_norm(GradNormArgs args, c10::Device) const override {
    int64_t chunks = 0;
    for (int64_t i = 0; i < args.grads.size; ++i)
      chunks += chunk_count(args.grads.tensors[i].numel);
    const std::unique_ptr<double[]> sums(new double[chunks]);
    args.workspace = sums.get();
    check("amp_ext::grad_norm", cpu::launch_grad_norm(args, kContext));
  }
  void update_scale(UpdateScaleArgs args, c10::Device) const override {
    check("amp_ext::update_scale_", cpu::launch_update_scale(args, kContext));
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

TORCH_LIBRARY_IMPL(amp_ext, CPU, m) { register_ops(m); }

// Sparse tensors reach the ops' checks, whose errors name the argument.
TORCH_LIBRARY_IMPL(amp_ext, SparseCPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCUDA, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCsrCPU, m) { register_ops(m); }
TORCH_LIBRARY_IMPL(amp_ext, SparseCsrCUDA, m) { register_ops(m); }

}  // namespace amp_ext
