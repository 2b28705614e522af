// Walks a tensor list in one launch: a persistent grid over the list's chunks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <ptx/common.cuh>
#include <type_traits>

#include "backend.h"
#include "element.cuh"
#include "launch.cuh"

namespace amp_ext {

constexpr int kForeachThreads = 512;
constexpr int kForeachBlocksPerSm = 2;
constexpr int kPacksInFlight = 4;  // 16-byte loads that a thread issues before the first use

// Begins every kernel on lists. If the grid fills the device, most of the next grid's blocks take
// the places of the first blocks to end.
__device__ inline void begin_grid() {
  ptx::wait_for_previous_grid();
  ptx::let_next_grid_begin();
}

// Returns the owner of `chunk` by bisection: the last entry that begins at or before it. Empty
// tensors precede the entry with the same first chunk.
template <class Entry>
__device__ int owner_of(const Entry* entries, int size, uint32_t chunk) {
  int low = 0, high = size;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (entries[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

// Sizes in bytes of tables in a kernel's parameters. Each launch copies the whole table, so a short
// list uses a small one. The capacities are 42, 256 or 1344 tensors and 32, 192 or 1008 pairs.
constexpr int kSmallTable = 1 << 10;
constexpr int kMediumTable = 6 << 10;
constexpr int kLargeTable = 32256;  // kernel parameters have at most 32,764 bytes

// A chunk table inside the kernel's parameters. DeviceTable points to device memory instead.
template <class Entry, int kBytes>
struct InlineTable {
  static constexpr int64_t kCapacity = kBytes / sizeof(Entry);

  uint32_t chunks;
  int32_t size;
  Entry inline_entries[kCapacity];
  __device__ const Entry* entries() const { return inline_entries; }
};

template <class Entry>
struct DeviceTable {
  uint32_t chunks;
  int32_t size;
  const Entry* device_entries;
  __device__ const Entry* entries() const { return device_entries; }
};

// The calling block's range of all chunks' pieces, and the index of the entry that owns its first
// piece. The ranges of the first blocks are one piece longer.
struct Share {
  uint32_t begin, end;
  int first = 0;

  template <class Table>
  __device__ explicit Share(const Table& table) {
    const uint32_t pieces = table.chunks * kChunkPieces, per_block = pieces / gridDim.x;
    const uint32_t longer_blocks = pieces - per_block * gridDim.x;
    const auto begin_of = [=](uint32_t block) {
      return block * per_block + (block < longer_blocks ? block : longer_blocks);
    };
    begin = begin_of(blockIdx.x), end = begin_of(blockIdx.x + 1);
    if (begin < end) first = owner_of(table.entries(), table.size, begin / kChunkPieces);
  }
};

// A block's current work: n elements of a chunk, beginning at element `offset` of the tensor.
template <int kThreads>
struct Span {
  uint32_t chunk;
  int64_t offset;
  int n;

  // Returns the thread's index within the span. Each use computes it anew, to hold no register.
  //
  // Each chunk numbers the threads from another warp, so that warps left idle by a short tensor
  // continue with the next one. Reversed bits put the first warps of neighbouring chunks far apart.
  __device__ int thread() const {
    constexpr uint32_t kWarps = kThreads / 32;
    static_assert((kWarps & (kWarps - 1)) == 0);
    const uint32_t first_warp = ptx::reversed_bits(chunk) / (UINT32_MAX / kWarps + 1);
    return (ptx::thread_index() + first_warp * 32) % kThreads;
  }
};

using ForeachSpan = Span<kForeachThreads>;

// Calls body(entry, span) for each span of the block's share. Threads do not synchronise.
template <int kThreads, class Table, class Body>
__device__ void for_each_span(const Table& table, const Share& share, Body body) {
  const auto* entries = table.entries();
  int i = share.first;
  for (uint32_t piece = share.begin; piece < share.end;) {
    const uint32_t chunk = piece / kChunkPieces, next = (chunk + 1) * kChunkPieces;
    while (i + 1 < table.size && entries[i + 1].first_chunk <= chunk) ++i;
    const auto& entry = entries[i];
    const int64_t offset =
        static_cast<int64_t>(piece - entry.first_chunk * kChunkPieces) * kPieceElements;
    const int64_t left = entry.numel - offset;
    const int most = ((next < share.end ? next : share.end) - piece) * kPieceElements;
    if (left > 0)
      body(entry, Span<kThreads>{chunk, offset, left < most ? static_cast<int>(left) : most});
    piece = next;
  }
}

// Calls use(T* data), with T the tensor's element type, const if Void is const.
template <class Void, class Use>
__device__ void with_elements(Void* data, DType dtype, Use use) {
  const auto as = [&](auto element) {
    using T = decltype(element);
    use(static_cast<std::conditional_t<std::is_const_v<Void>, const T, T>*>(ptx::global(data)));
  };
  switch (dtype) {
    case DType::f32: as(float{}); break;
    case DType::f16: as(__half{}); break;
    case DType::bf16: as(__nv_bfloat16{}); break;
    case DType::f64: as(double{}); break;
  }
}

// Calls body.visit(span, T* data) for each span of the block's share.
template <class Table, class Body>
__device__ void visit_spans(const Table& table, Body& body) {
  for_each_span<kForeachThreads>(
      table, Share(table), [&](const TensorRef& entry, const ForeachSpan& span) {
        with_elements(entry.data, entry.dtype,
                      [&](auto* data) { body.visit(span, data + span.offset); });
      });
}

template <class T>
__device__ int elements_to_alignment(const T* data) {
  return static_cast<int>(-reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T));
}

// Calls packs(T* at, uint4 (&bits)[k]) for k packs of 16 bytes, kForeachThreads packs apart. Calls
// single(T* at) for each element at the span's ends outside whole packs.
template <class T, class Packs, class Single>
__device__ void for_each_batch(const ForeachSpan& span, T* data, Packs packs, Single single) {
  constexpr int kPack = Pack<T>::kSize;
  const int head = elements_to_alignment(data);
  const int count = (span.n - head) / kPack;
  const int singles = span.n - count * kPack;

  const auto batch = [&](int i, auto size) {
    T* const at = data + head + i * kPack;
    uint4 bits[decltype(size)::value];
#pragma unroll
    for (int k = 0; k < decltype(size)::value; ++k)
      bits[k] = ptx::load16(at + k * kForeachThreads * kPack);
    packs(at, bits);
  };
  const int thread = span.thread();
  int i = thread;
  for (; i + (kPacksInFlight - 1) * kForeachThreads < count; i += kPacksInFlight * kForeachThreads)
    batch(i, std::integral_constant<int, kPacksInFlight>{});
  for (; i < count; i += kForeachThreads) batch(i, std::integral_constant<int, 1>{});
  if (thread < singles) single(data + thread + (thread < head ? 0 : count * kPack));
}

// Computes x = f(x) for the elements of a span of any alignment. Without kWrite, memory is only
// read and f's result is dropped.
template <bool kWrite, class T, class F>
__device__ void for_each_element(const ForeachSpan& span, T* data, F f) {
  for_each_batch(
      span, data,
      [&](T* at, const auto& bits) {
#pragma unroll
        for (int k = 0; k < std::extent_v<std::remove_reference_t<decltype(bits)>>; ++k) {
          Pack<T> values = Pack<T>::from(bits[k]);
#pragma unroll
          for (T& value : values.at) value = f(value);
          if constexpr (kWrite)
            ptx::store16(at + k * kForeachThreads * Pack<T>::kSize, values.bits());
        }
      },
      [&](T* at) {
        const T result = f(*at);
        if constexpr (kWrite) *at = result;
      });
}

// Returns the blocks of a grid that fills the device once, or one per piece of a short list.
inline int foreach_blocks(uint32_t chunks, int blocks_per_sm, const cuda::Target& target) {
  return static_cast<int>(
      std::min<uint32_t>(chunks * kChunkPieces, blocks_per_sm * target.multiprocessors));
}

inline int foreach_blocks(uint32_t chunks, const cuda::Target& target) {
  return foreach_blocks(chunks, kForeachBlocksPerSm, target);
}

// Calls launch_table(table, target) with the smallest table that holds the list.
template <class Ref, class LaunchTable>
Status launch_list(const ListOf<Ref>& list, Services& services, LaunchTable launch_table) {
  const auto launch = [&](auto& table, Status built) {
    table.size = static_cast<int32_t>(list.size);
    return built == Status::ok ? launch_table(table, services.target()) : built;
  };
  const auto launch_inline = [&](auto bytes) {
    InlineTable<Ref, bytes> table;
    static_assert(sizeof table <= 32764 - 256, "an op's arguments are parameters too");
    return launch(table, build_chunk_table(list, table.inline_entries, &table.chunks));
  };
  const auto fits = [&](auto bytes) { return list.size <= InlineTable<Ref, bytes>::kCapacity; };
  constexpr std::integral_constant<int, kSmallTable> small;
  constexpr std::integral_constant<int, kMediumTable> medium;
  constexpr std::integral_constant<int, kLargeTable> large;
  if (fits(small)) return launch_inline(small);
  if (takes_long_parameters()) {
    if (fits(medium)) return launch_inline(medium);
    if (fits(large)) return launch_inline(large);
  }
  DeviceTable<Ref> table;
  return launch(table, send_table(list, services, &table.device_entries, &table.chunks));
}

}  // namespace amp_ext
