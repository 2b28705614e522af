// Defines the element types that kernels accept.
#pragma once

#include <cstdint>

#include "amp_ext/host_device.h"

namespace amp_ext {

enum class DType : uint8_t { f32, f16, bf16, f64 };

constexpr int kDTypes = 4;

AMP_EXT_HOST_DEVICE constexpr int size_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return 4;
    case DType::f16: return 2;
    case DType::bf16: return 2;
    case DType::f64: return 8;
  }
  return 0;
}

AMP_EXT_HOST_DEVICE constexpr bool is_16_bit(DType dtype) { return size_of(dtype) == 2; }

}  // namespace amp_ext
