// Takes the place of cuda.cpp in a build without CUDA kernels.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "backend.h"
#include "triton.h"

namespace amp_ext {

const Backend& cuda_backend() {
  TORCH_CHECK(
      false,
      "amp_ext was built without CUDA kernels and was given a CUDA tensor; install Triton "
      "for its Triton kernels, or, with a CUDA toolkit and a CUDA build of torch installed, "
      "rebuild it from its source tree with: "
      "FORCE_CUDA=1 pip install --force-reinstall --no-deps .");
}

bool cuda_built() { return false; }
bool cuda_serves(const GemmArgs&) { return false; }

namespace {

// The CPU's functions serve the tensors of any device that has a backend.
void serve(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (!uses_triton(at::kCUDA)) cuda_backend();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_ext, CUDA, m) {
  for (const char* op : {"unscale_", "check_finite", "grad_norm", "update_scale_", "cast_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<serve>());
  }
}

}  // namespace amp_ext
