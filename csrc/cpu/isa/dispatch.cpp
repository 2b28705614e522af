// Chooses the instruction set at run time.
#ifdef AMP_EXT_X86
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
#ifdef AMP_EXT_X86
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
#ifdef AMP_EXT_X86
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

// Whether the processor multiplies 16-bit types with FP32 sums, and whether by AMX (tiles).
struct Products {
  bool f16 = false;
  bool bf16 = false;
  bool f16_tiles = false;
  bool bf16_tiles = false;
};

Products find_products() {
  Products found;
#ifdef AMP_EXT_X86
  constexpr unsigned kAvx512Fp16 = 1 << 23, kAmxBf16 = 1 << 22, kAvx512Bf16 = 1 << 5,
                     kAmxFp16 = 1 << 21;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!allowed("avx512")) return found;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    found.f16 = edx & kAvx512Fp16;
    found.bf16_tiles = edx & kAmxBf16;
  }
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) {
    found.bf16 = eax & kAvx512Bf16;
    found.f16_tiles = eax & kAmxFp16;
  }
#endif
  return found;
}

const Products& products() {
  static const Products found = find_products();
  return found;
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

bool has_products_of(DType type) {
  return (type == DType::f16 && products().f16) || (type == DType::bf16 && products().bf16);
}

bool has_tiles_of(DType type) {
  return (type == DType::f16 && products().f16_tiles) ||
         (type == DType::bf16 && products().bf16_tiles);
}

const SpanKernels& span_kernels() { return kernels().span; }
const RowKernels& row_kernels() { return kernels().row; }
const UpdateKernels& update_kernels() { return kernels().update; }

}  // namespace amp_ext::cpu
