// 16-bit elements as numbers, without branches: loops over them become vector code.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>

#include "simt.h"

namespace simt {

inline float from_half(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;  // the biases' difference
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t number = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : finite;
  return std::bit_cast<float>(number | (bits & 0x8000u) << 16);
}

inline float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

template <Element kType>
float to_float(uint16_t bits) {
  return kType == Element::half ? from_half(bits) : from_bfloat16(bits);
}

}  // namespace simt
