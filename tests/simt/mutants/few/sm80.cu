// Of the GEMM kernel instances with tiles of each kind, and with each way in which an operand can
// lie: see instances.h.
#include "gemm/sm80/gemm.cuh"
#include "instances.h"

namespace amp_ext {
namespace {

constexpr int kLongLines = 2, kShortLines = 4, kRowOfWarps = 5, kColumnOfWarps = 6, kUnaligned = 8;
static_assert(kGemmTiles[kLongLines].m == 128 && kGemmTiles[kShortLines].m == 64 &&
              kGemmTiles[kRowOfWarps].warps_m == 1 && kGemmTiles[kColumnOfWarps].warps_n == 1 &&
              !kGemmTiles[kUnaligned].aligned);
constexpr Major k = Major::k, mn = Major::mn;

template <class T, int kTile, Major kA, Major kB>
constexpr Instance kOf{kTile, kA, kB, launch_instance<T, kTile, kA, kB>};

}  // namespace

Status launch_gemm_f16(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                       uint32_t* tickets, cuda::Stream stream) {
  using T = __half;
  return launch_one_of(
      {kOf<T, kLongLines, k, mn>, kOf<T, kShortLines, k, mn>, kOf<T, kRowOfWarps, k, mn>,
       kOf<T, kUnaligned, k, mn>, kOf<T, kRowOfWarps, k, k>, kOf<T, kColumnOfWarps, mn, k>},
      args, plan, workspace, tickets, stream);
}

Status launch_gemm_bf16(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                        uint32_t* tickets, cuda::Stream stream) {
  using T = __nv_bfloat16;
  return launch_one_of({kOf<T, kLongLines, mn, k>, kOf<T, kShortLines, mn, k>,
                        kOf<T, kRowOfWarps, mn, k>, kOf<T, kUnaligned, mn, k>},
                       args, plan, workspace, tickets, stream);
}

}  // namespace amp_ext
