// Takes the place of cuda.cpp in a build without CUDA kernels.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "backend.h"

namespace amp_ext {

const Backend& cuda_backend() {
  TORCH_CHECK(false,
              "amp_ext was built without CUDA kernels and was given a CUDA tensor; with a CUDA "
              "toolkit and a CUDA build "
              "of torch installed, rebuild it from its source tree with: "
              "FORCE_CUDA=1 pip install --force-reinstall --no-deps .");
}

bool cuda_built() { return false; }
bool cuda_serves(const GemmArgs&) { return false; }

namespace {

void refuse(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*) { cuda_backend(); }

}  // namespace

TORCH_LIBRARY_IMPL(amp_ext, CUDA, m) {
  for (const char* op : {"unscale_", "check_finite", "grad_norm", "update_scale_",
                         "grad_norm_update_scale_", "cast_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<refuse>());
  }
}

}  // namespace amp_ext
