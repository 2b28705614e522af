// Verifies the kernels of a backend on a device. amp_ext/verify.py compares a GPU's kernels with
// the reference before their first use there. Kernels with other results are not used.
#pragma once

#include <c10/core/Device.h>

#include <optional>
#include <string_view>

#include "amp_ext/backend.h"

namespace amp_ext {

// The name of kernels that are verified apart from the rest: of an op on lists, or of the products
// of one operand type.
using Family = std::string_view;

#define AMP_EXT_FAMILY_OF(op, Args) \
  inline Family family_of(const Args&) { return #op; }
AMP_EXT_LIST_OPS(AMP_EXT_FAMILY_OF)
#undef AMP_EXT_FAMILY_OF
inline Family family_of(const GemmArgs& g) {
  return g.a.dtype == DType::bf16 ? "gemm_bf16" : "gemm_f16";
}

// Returns whether a backend's kernels of a family are right on a device; none without an answer
// now, such as for lack of memory. The first call verifies them, unless `known_only`: it runs
// Python and waits for the device. Throws where a CUDA graph would capture that first call. All
// kernels on a CPU, and those of the backend under test, count as right.
std::optional<bool> is_verified(const Backend& backend, Family family, c10::Device device,
                                bool known_only = false);

}  // namespace amp_ext
