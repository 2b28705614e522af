// Fill global memory without a write with words that mark it.
#pragma once

#include <cstdint>
#include <cstring>

namespace cudasim {

// The word at an address, a multiple of 8: NaN as a number of any format, and unlike any data.
inline uint64_t fresh_word(uint64_t address) {
  const uint64_t hash = address / 8 * 0x9e3779b97f4a7c15ull >> 32;
  return 0xffc0ffc0ffc0ffc0ull | (hash & 0x3f) | (hash & 0xfc0) << 10 | (hash & 0x3f000) << 20 |
         (hash & 0xfc0000) << 30;
}

inline void fill_fresh(void* memory, size_t bytes) {
  auto* const begin = static_cast<char*>(memory);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t word = fresh_word(reinterpret_cast<uintptr_t>(begin + i));
    memcpy(begin + i, &word, 8);
  }
  memset(begin + bytes / 8 * 8, 0xff, bytes % 8);
}

}  // namespace cudasim
