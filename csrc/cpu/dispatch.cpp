// Chooses the instruction set at run time.
#include <cstdlib>
#include <cstring>

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

// torch's own variable: ATEN_CPU_CAPABILITY=default or avx2 asks for less than the processor has.
bool allowed(const char* capability) {
  const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
  if (!limit || std::strcmp(limit, "avx512") == 0) return true;
  return std::strcmp(limit, "avx2") == 0 && std::strcmp(capability, "avx2") == 0;
}

const SpanKernels& choose() {
#ifdef AMP_EXT_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && allowed("avx512")) return avx512::kernels;
  if (avx2 && allowed("avx2")) return avx2::kernels;
#endif
  return baseline::kernels;
}

}  // namespace

const SpanKernels& span_kernels() {
  static const SpanKernels& kernels = choose();
  return kernels;
}

}  // namespace amp_ext::cpu
