// Defines parts of a tile in a consumer's registers, and their layout in TMA's boxes.
#pragma once

#include <cstring>

#include "element.cuh"
#include "split.cuh"

namespace amp_ext {

// A thread's elements of 8 columns of a part. Lane l of warp w holds element 2 h + i in row 16 w +
// l / 4 + 8 h and column 2 (l % 4) + i.
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

  // Returns the address of elements i and i + 1 of group `number` in a box of T with 32 columns.
  template <class T>
  __device__ static Pair<T>* place(unsigned char* box, int number, int i) {
    constexpr int kRowBytes = Sm90Tile::kPartColumns * sizeof(T);
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

  // Rounds the elements and writes them.
  template <class T>
  __device__ void write(unsigned char* box, int number) const {
#pragma unroll
    for (int i = 0; i < kSize; i += 2) {
      const Pair<T> pair{Element<T>::round(at[i]), Element<T>::round(at[i + 1])};
      ptx::store_shared(place<T>(box, number, i), pair);
    }
  }
};

// A thread's elements of 64 rows by kColumns: of a part, or of several side by side.
template <int kColumns>
struct Part {
  static constexpr int kGroups = kColumns / Group::kColumns;
  Group groups[kGroups];

  // Computes x *= alpha.
  __device__ void scale(float alpha) {
#pragma unroll
    for (Group& group : groups) {
#pragma unroll
      for (float& value : group.at) value *= alpha;
    }
  }
  // Adds the bias of the columns.
  __device__ void add(const float* bias) {
    bias += Group::column(0);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < Group::kSize; ++j) groups[i].at[j] += bias[i * Group::kColumns + j % 2];
    }
  }

  // Calls use(group, number) for each group in a rolled loop, which saves instructions and
  // registers. The groups rotate through the first registers.
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
        const Group &own = x.groups[i], &other = x.groups[i ^ 2];
        const auto value = [&](int j) { return is_odd_ ? other.at[j] : own.at[j]; };
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
          const float* const at = x.groups[i + j / 2].at + j % 2 * 2;
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
    return group * Group::kColumns * static_cast<int>(sizeof(T));
  }

  int place_;  // offset of this thread's first group, or first pair of groups
  bool is_odd_ = false;
};

}  // namespace amp_ext
