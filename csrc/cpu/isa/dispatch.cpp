// Chooses the instruction set at run time.
#include <cstdlib>
#include <cstring>

#include "isa/span.h"
#include "isa/tile.h"
#include "isa/update.h"

namespace amp_ext::cpu {

#define AMP_EXT_DECLARE_KERNELS(isa)         \
  namespace isa {                            \
  extern const SpanKernels kernels;          \
  extern const TileKernels tile_kernels;     \
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
  const TileKernels& tile;
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
    return {avx512::kernels, avx512::tile_kernels, avx512::update_kernels};
  if (avx2 && allowed("avx2")) return {avx2::kernels, avx2::tile_kernels, avx2::update_kernels};
#endif
  return {baseline::kernels, baseline::tile_kernels, baseline::update_kernels};
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

const SpanKernels& span_kernels() { return kernels().span; }
const TileKernels& tile_kernels() { return kernels().tile; }
const UpdateKernels& update_kernels() { return kernels().update; }

}  // namespace amp_ext::cpu
