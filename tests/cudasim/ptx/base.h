// Declare fixed-width types, loops over lanes and faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace cudasim {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

constexpr int kLanes = 32;
constexpr u32 kAllLanes = 0xffffffffu;

template <class F>
inline void each_lane(u32 lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
}

// A rule of PTX or of CUDA that a kernel breaks. `hint` names the usual cause.
struct Fault {
  std::string text, hint;
  int lane = -1;  // -1: the first lane that runs the instruction
};

[[noreturn]] __attribute__((format(printf, 2, 3))) void fault(const char* hint, const char* format,
                                                              ...);
[[noreturn]] __attribute__((format(printf, 3, 4))) void fault_of(int lane, const char* hint,
                                                                 const char* format, ...);
__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);

}  // namespace cudasim
