// Converts fp16 to fp32, for span.cpp and rows.cpp and under their rules.
#pragma once

#include <cstdint>
#include <cstring>

namespace amp_ext::cpu {
namespace {

template <class To, class From>
inline To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

inline float widen_f16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t magnitude = half & 0x7fff;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t rebias = magnitude >= 0x7c00 ? (255 - 31) << 23 : (127 - 15) << 23;
  const uint32_t normal = (magnitude << 13) + rebias;
  return bit_cast<float>(sign | (magnitude < 0x400 ? bit_cast<uint32_t>(subnormal) : normal));
}

}  // namespace
}  // namespace amp_ext::cpu
