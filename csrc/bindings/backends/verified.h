// Verifies the kernels of a backend on a device. amp_ext/verify.py compares a GPU's kernels with
// the reference before their first use there. Kernels with other results are not used.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "amp_ext/backend.h"

namespace amp_ext {

// The kernels that are verified apart from the rest: of an op on lists, or of the products of one
// operand type. If a backend has several of GemmArgs::kernels, each of them is apart too.
#define AMP_EXT_FAMILIES(OP)   \
  AMP_EXT_LIST_OPS(OP)         \
  OP(gemm_f16, GemmArgs)       \
  OP(gemm_bf16, GemmArgs)      \
  OP(gemm_sm80_f16, GemmArgs)  \
  OP(gemm_sm80_bf16, GemmArgs) \
  OP(gemm_sm90_f16, GemmArgs)  \
  OP(gemm_sm90_bf16, GemmArgs)

#define AMP_EXT_FAMILY(name, Args) name,
enum class Family : uint8_t { AMP_EXT_FAMILIES(AMP_EXT_FAMILY) };
#undef AMP_EXT_FAMILY

#define AMP_EXT_FAMILY_OF(op, Args) \
  inline Family family_of(const Args&) { return Family::op; }
AMP_EXT_LIST_OPS(AMP_EXT_FAMILY_OF)
#undef AMP_EXT_FAMILY_OF
inline Family family_of(const GemmArgs& g) {
  return g.a.dtype == DType::bf16 ? Family::gemm_bf16 : Family::gemm_f16;
}
inline Family family_of_sm80(const GemmArgs& g) {
  return g.a.dtype == DType::bf16 ? Family::gemm_sm80_bf16 : Family::gemm_sm80_f16;
}
inline Family family_of_sm90(const GemmArgs& g) {
  return g.a.dtype == DType::bf16 ? Family::gemm_sm90_bf16 : Family::gemm_sm90_f16;
}

// Returns whether a backend may run a call. The first call of a family on a device verifies it: it
// runs Python and waits for the device. Throws where a CUDA graph would capture that first call.
// The CPU's own backend, the backend under test and Triton's interpreter always may.
bool is_verified(const Backend& backend, Family family, c10::Device device);

// Returns whether is_verified answers at once.
bool is_known(const Backend& backend, Family family, c10::Device device);

}  // namespace amp_ext
