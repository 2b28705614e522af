// Defines parts of a tile in a consumer's registers, and their layout in TMA's boxes.
#pragma once

#include <cstring>

#include "consumer.cuh"
#include "element.cuh"

namespace amp_ext {

// A thread's elements of 64 rows by kColumns: of a part, or of several side by side. Each group of
// 8 columns has four. Lane l of warp w holds element 2 h + i of a group in row 16 w + l / 4 + 8 h
// and column 2 (l % 4) + i.
template <int kColumns>
struct Part {
  static constexpr int kGroupColumns = 8, kGroupSize = 4;
  static constexpr int kGroups = kColumns / kGroupColumns, kSize = kGroups * kGroupSize;
  float at[kSize];

  // Returns the row and the column of element i, an index of `at`.
  __device__ static int row(int i) {
    const int thread = consumer_thread();
    return thread / 32 * 16 + thread % 32 / 4 + i % kGroupSize / 2 * 8;
  }
  __device__ static int column(int i) {
    return i / kGroupSize * kGroupColumns + consumer_thread() % 4 * 2 + i % 2;
  }

  // Computes x *= alpha.
  __device__ void scale(float alpha) {
#pragma unroll
    for (float& value : at) value *= alpha;
  }
  // Adds the bias of the columns.
  __device__ void add(const float* bias) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) at[i] += bias[column(i)];
  }
  // Adds beta times another part.
  __device__ void add(float beta, const Part& other) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) at[i] += beta * other.at[i];
  }

  // Reads the elements from a box of T with kColumns columns.
  template <class T>
  __device__ void read(const unsigned char* box) {
    struct alignas(2 * sizeof(T)) Pair {
      T low, high;
    };
    constexpr int kBytes = sizeof(T);
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const int byte = column(i) * kBytes;
      const int place = swizzled<kColumns * kBytes>(row(i), byte / 16) + byte % 16;
      const Pair pair = *reinterpret_cast<const Pair*>(box + place);
      at[i] = Element<T>::widen(pair.low);
      at[i + 1] = Element<T>::widen(pair.high);
    }
  }
};

// Rounds a thread's elements to T and writes them to boxes of kColumns columns.
template <class T, int kColumns>
class BoxWriter {
 public:
  __device__ BoxWriter() {
    const int thread = consumer_thread(), lane = thread % 32, warp_row = thread / 32 * 16;
    if constexpr (sizeof(T) == 4) {
      const int row = warp_row + lane / 4, byte = lane % 4 * 8;
      is_odd_ = row % 2;
      place_ = (swizzled<kRowBytes>(row, byte / 16) + byte % 16) ^ group_offset(is_odd_ ? 2 : 0);
    } else {
      place_ = swizzled<kRowBytes>(warp_row + lane % 16, lane / 16);
    }
  }

  __device__ void write(const Part<kColumns>& x, unsigned char* box) const {
    if constexpr (sizeof(T) == 4) {
      // Equal groups of rows 2 r and 2 r + 1 share banks, so odd rows write the group of the other
      // half first.
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        const float *const own = x.at + 4 * i, *const other = x.at + 4 * (i ^ 2);
        const auto value = [&](int j) { return is_odd_ ? other[j] : own[j]; };
        unsigned char* const to = box + (place_ ^ group_offset(i));
        ptx::store_shared(reinterpret_cast<float2*>(to), float2{value(0), value(1)});
        ptx::store_shared(reinterpret_cast<float2*>(to + 8 * kRowBytes),
                          float2{value(2), value(3)});
      }
    } else {
      // Each stmatrix writes four 8x8 matrices: upper and lower rows of 8 columns, then of the next
      // 8.
#pragma unroll
      for (int i = 0; i < kGroups; i += 2) {
        uint32_t matrices[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const at = x.at + 4 * i + 2 * j;
          const T pair[2] = {Element<T>::round(at[0]), Element<T>::round(at[1])};
          memcpy(&matrices[j], pair, sizeof(pair));
        }
        ptx::stmatrix(box + (place_ ^ group_offset(i)), matrices);
      }
    }
  }

 private:
  static constexpr int kGroups = Part<kColumns>::kGroups, kRowBytes = kColumns * sizeof(T);

  // Returns a group's offset from the first group, combined by exclusive or as in the swizzle.
  __device__ static constexpr int group_offset(int group) {
    return group * Part<kColumns>::kGroupColumns * static_cast<int>(sizeof(T));
  }

  int place_;  // offset of this thread's first group, or first pair of groups
  bool is_odd_ = false;
};

}  // namespace amp_ext
