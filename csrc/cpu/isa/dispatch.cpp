// Chooses the instruction set at run time.
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <cstdlib>
#include <cstring>

#include "backend.h"
#include "isa/rows.h"
#include "isa/span.h"
#include "isa/update.h"

namespace amp_ext::cpu {

#define AMP_EXT_DECLARE_KERNELS(isa)         \
  namespace isa {                            \
  extern const SpanKernels kernels;          \
  extern const RowKernels row_kernels;       \
  extern const UpdateKernels update_kernels; \
  }

AMP_EXT_DECLARE_KERNELS(baseline)
#ifdef __x86_64__
AMP_EXT_DECLARE_KERNELS(avx2)
AMP_EXT_DECLARE_KERNELS(avx512)
#endif

namespace {

struct Kernels {
  const SpanKernels& span;
  const RowKernels& row;
  const UpdateKernels& update;
};

// Respects torch's variable: ATEN_CPU_CAPABILITY=default or avx2 limits the instruction set.
bool allowed(const char* capability) {
  const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
  if (!limit || std::strcmp(limit, "avx512") == 0) return true;
  return std::strcmp(limit, "avx2") == 0 && std::strcmp(capability, "avx2") == 0;
}

Kernels choose() {
#ifdef __x86_64__
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && allowed("avx512"))
    return {avx512::kernels, avx512::row_kernels, avx512::update_kernels};
  if (avx2 && allowed("avx2")) return {avx2::kernels, avx2::row_kernels, avx2::update_kernels};
#endif
  return {baseline::kernels, baseline::row_kernels, baseline::update_kernels};
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

// Returns a bit of leaf 7 of CPUID, unless torch's variable excludes AVX-512. Register 0 is EAX and
// 3 is EDX.
bool has_feature([[maybe_unused]] unsigned subleaf, int index, int bit) {
  unsigned registers[4] = {};
#ifdef __x86_64__
  __get_cpuid_count(7, subleaf, &registers[0], &registers[1], &registers[2], &registers[3]);
#endif
  return allowed("avx512") && (registers[index] >> bit & 1);
}

}  // namespace

bool has_products_of(DType type) {
  // AVX512_FP16 and AVX512_BF16
  static const bool f16 = has_feature(0, 3, 23), bf16 = has_feature(1, 0, 5);
  return (type == DType::f16 && f16) || (type == DType::bf16 && bf16);
}

bool has_tiles_of(DType type) {
  // AMX_FP16 and AMX_BF16
  static const bool f16 = has_feature(1, 0, 21), bf16 = has_feature(0, 3, 22);
  return (type == DType::f16 && f16) || (type == DType::bf16 && bf16);
}

const SpanKernels& span_kernels() { return kernels().span; }
const RowKernels& row_kernels() { return kernels().row; }
const UpdateKernels& update_kernels() { return kernels().update; }

}  // namespace amp_ext::cpu
