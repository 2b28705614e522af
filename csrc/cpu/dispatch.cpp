// Chooses the instruction set at run time.
#include "span.h"

namespace amp_ext::cpu {

namespace baseline {
extern const SpanKernels kernels;
}
#ifdef AMP_EXT_X86
namespace avx2 {
extern const SpanKernels kernels;
}
namespace avx512 {
extern const SpanKernels kernels;
}
#endif

namespace {

const SpanKernels& choose() {
#ifdef AMP_EXT_X86
  __builtin_cpu_init();
  const bool fma_f16c = __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (fma_f16c && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return avx512::kernels;
  }
  if (fma_f16c && __builtin_cpu_supports("avx2")) return avx2::kernels;
#endif
  return baseline::kernels;
}

}  // namespace

const SpanKernels& span_kernels() {
  static const SpanKernels& kernels = choose();
  return kernels;
}

}  // namespace amp_ext::cpu
