// Takes the place of cuda.cpp in a build without CUDA kernels.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "backend.h"
#include "ops.h"

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

TORCH_LIBRARY_IMPL(amp_ext, CUDA, m) { register_ops(m); }

}  // namespace amp_ext
