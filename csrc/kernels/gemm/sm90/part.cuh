// Parts of a tile: 64 rows by 32 columns, of which each thread of a consumer has 16 elements, and
// which lie in a box of shared memory as TMA stores them.
#pragma once

#include <cstring>

#include "element.cuh"
#include "split.cuh"

namespace amp_ext {

// Calls use(T()) with an element of the type.
template <class Use>
__device__ void with_type(DType dtype, Use use) {
  if (dtype == DType::f32) return use(float());
  if (dtype == DType::f16) return use(__half());
  use(__nv_bfloat16());
}

// A thread's elements of 8 columns of a part: of lane l of warp w, element 2 h + i in row
// 16 w + l / 4 + 8 h and column 2 (l % 4) + i.
struct Group {
  static constexpr int kSize = 4, kColumns = 8;
  float at[kSize];

  __device__ static int row(int i) {
    const int thread = consumer_thread();
    return thread / 32 * 16 + thread % 32 / 4 + i / 2 * 8;
  }
  __device__ static int column(int i) { return consumer_thread() % 4 * 2 + i % 2; }

  template <class T>
  struct alignas(2 * sizeof(T)) Pair {
    T low, high;
  };

  // The place of elements i and i + 1 in a box of T, in which the group has this number.
  template <class T>
  __device__ static Pair<T>* place(unsigned char* box, int number, int i) {
    constexpr int kRowBytes = Sm90Tile::kBoxColumns * sizeof(T);
    const int byte = (number * kColumns + column(i)) * static_cast<int>(sizeof(T));
    return reinterpret_cast<Pair<T>*>(box + swizzled<kRowBytes>(row(i), byte / 16) + byte % 16);
  }

  template <class T>
  __device__ void read(unsigned char* box, int number) {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const Pair<T> pair = *place<T>(box, number, i);
      at[i] = Element<T>::widen(pair.low);
      at[i + 1] = Element<T>::widen(pair.high);
    }
  }

  // Rounds them.
  template <class T>
  __device__ void write(unsigned char* box, int number) const {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const Pair<T> pair{Element<T>::round(at[i]), Element<T>::round(at[i + 1])};
      ptx::store_shared(place<T>(box, number, i), pair);
    }
  }
};

// A thread's elements of a part.
struct Part {
  static constexpr int kGroups = Sm90Tile::kBoxColumns / Group::kColumns;
  Group groups[kGroups];

  // Calls use(group, number) for each. In a loop, through which they pass by turns: what is done to
  // four numbers is long enough, and takes registers enough.
  template <class Use>
  __device__ void each(Use use) {
#pragma unroll 1
    for (int number = 0; number < kGroups; ++number) {
      Group group = groups[0];
      use(group, number);
#pragma unroll
      for (int i = 1; i < kGroups; ++i) groups[i - 1] = groups[i];
      groups[kGroups - 1] = group;
    }
  }

  // Rounds them and writes them to a box of T.
  template <class T>
  __device__ void write(unsigned char* box) const {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kGroups; ++i) groups[i].write<T>(box, i);
    } else {
      constexpr int kRowBytes = Sm90Tile::kBoxColumns * sizeof(T);
      const int thread = consumer_thread(), lane = thread % 32;
      const int row = thread / 32 * 16 + lane % 16;
      // Four matrices of 8x8 at a time: upper and lower rows, then the same of the next 8 columns.
#pragma unroll
      for (int i = 0; i < kGroups; i += 2) {
        uint32_t matrices[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const at = groups[i + j / 2].at + j % 2 * 2;
          const T pair[2] = {Element<T>::round(at[0]), Element<T>::round(at[1])};
          memcpy(&matrices[j], pair, sizeof(pair));
        }
        ptx::stmatrix(box + swizzled<kRowBytes>(row, i + lane / 16), matrices);
      }
    }
  }
};

}  // namespace amp_ext
