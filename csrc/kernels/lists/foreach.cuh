// The walk of a tensor list by one launch: a persistent grid over the list's chunks.
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
constexpr int kPacksInFlight = 4;  // 16-byte loads a thread issues before the first use

// The first thing that a kernel on lists does. Where it fills the device, the next grid's blocks
// come in the places of its first ones that end: there are few registers left beside them.
__device__ inline void begin_grid() {
  ptx::wait_for_previous_grid();
  ptx::let_next_grid_begin();
}

// The last entry that begins at or before `chunk`: its owner, since empty tensors come before the
// entry they share a first chunk with.
template <class Entry>
__device__ int owner_by_halves(const Entry* entries, int size, uint32_t chunk) {
  int low = 0, high = size;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (entries[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

// The same by a whole warp, which divides by 32 while it waits for memory once.
template <class Entry>
__device__ int owner_by_warp(const Entry* entries, int size, uint32_t chunk) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = size;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, at = low + lane * step;
    low += (ptx::warp_count(at < high && entries[at].first_chunk <= chunk) - 1) * step;
    high = low + step < high ? low + step : high;
  }
  return low;
}

// Sizes in bytes of tables that travel in a kernel's parameters. All of these are copied at each
// launch, so a short list takes a small one: 42, 256 or 1344 tensors, 32, 192 or 1008 pairs.
constexpr int kSmallTable = 1 << 10;
constexpr int kMediumTable = 6 << 10;
constexpr int kLargeTable = 32256;  // parameters have 32,764 bytes at most

// A chunk table as a kernel parameter: in the parameter itself, or in device memory.
template <class Entry, int kBytes>
struct InlineTable {
  static constexpr int64_t kCapacity = kBytes / sizeof(Entry);

  uint32_t chunks;
  int32_t size;
  Entry inline_entries[kCapacity];
  __device__ const Entry* entries() const { return inline_entries; }
  __device__ int owner_of(uint32_t chunk) const { return owner_by_halves(entries(), size, chunk); }
};

template <class Entry>
struct DeviceTable {
  uint32_t chunks;
  int32_t size;
  const Entry* device_entries;
  __device__ const Entry* entries() const { return device_entries; }
  __device__ int owner_of(uint32_t chunk) const { return owner_by_warp(entries(), size, chunk); }
};

// How a grid's blocks share the pieces of all chunks: contiguous ranges, those of the first blocks
// one piece longer.
struct Shares {
  uint32_t per_block, longer_blocks;
  __device__ explicit Shares(uint32_t chunks)
      : per_block(chunks * kChunkPieces / gridDim.x),
        longer_blocks(chunks * kChunkPieces - per_block * gridDim.x) {}
  __device__ uint32_t begin(uint32_t block) const {
    return block * per_block + (block < longer_blocks ? block : longer_blocks);
  }
  __device__ uint32_t block_of(uint32_t piece) const {
    const uint32_t of_longer = longer_blocks * (per_block + 1);  // their pieces
    return piece < of_longer ? piece / (per_block + 1)
                             : longer_blocks + (piece - of_longer) / per_block;
  }
};

// This block's, and the index of the first piece's entry.
struct Share {
  uint32_t begin, end;
  int first = 0;

  template <class Table>
  __device__ explicit Share(const Table& table) {
    const Shares shares(table.chunks);
    begin = shares.begin(blockIdx.x), end = shares.begin(blockIdx.x + 1);
    if (begin < end) first = table.owner_of(begin / kChunkPieces);
  }
};

// What a block of kThreads threads takes at a time: n elements of a chunk, from the tensor's
// element `offset` on.
template <int kThreads>
struct Span {
  int tensor;  // its index in the list
  uint32_t chunk;
  int64_t offset;
  int n;

  // This thread's place among those that share the elements. It is computed anew at each use, to
  // need no register.
  //
  // Threads are numbered from another warp on for each chunk, so that the warps that short tensors
  // leave idle go on to the next ones. In the order of reversed bits neighbours are far apart.
  __device__ int thread() const {
    constexpr uint32_t kWarps = kThreads / 32;
    static_assert((kWarps & (kWarps - 1)) == 0);
    const uint32_t first_warp = ptx::reversed_bits(chunk) / (UINT32_MAX / kWarps + 1);
    return (ptx::thread_index() + first_warp * 32) % kThreads;
  }
};

using ForeachSpan = Span<kForeachThreads>;

// Calls body(entry, span) for all that is in this block's share. No thread waits for another.
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
      body(entry, Span<kThreads>{i, chunk, offset, left < most ? static_cast<int>(left) : most});
    piece = next;
  }
}

// Calls use(T* data), where T is the type of the tensor's elements, const where Void is.
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

// Calls body.visit(span, T* data) for all that is in this block's share of a list of tensors, each
// time after before(span), which is there once for all types.
template <class Table, class Body, class Before>
__device__ void visit_spans(const Table& table, Body& body, Before before) {
  for_each_span<kForeachThreads>(
      table, Share(table), [&](const ChunkEntry& entry, const ForeachSpan& span) {
        before(span);
        with_elements(entry.data, entry.dtype,
                      [&](auto* data) { body.visit(span, data + span.offset); });
      });
}

template <class Table, class Body>
__device__ void visit_spans(const Table& table, Body& body) {
  visit_spans(table, body, [](const ForeachSpan&) {});
}

template <class T>
__device__ int elements_to_alignment(const T* data) {
  return static_cast<int>(-reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T));
}

// Calls packs(T* at, uint4 (&bits)[k]) for k times 16 bytes of the span, each kForeachThreads packs
// behind the one before, and single(T* at) for the elements at its ends that are no whole pack.
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

// x = f(x) for the elements of a span, whatever their alignment; without kWrite f's result is
// dropped and memory is only read.
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

// A grid that fills the device once, or one block per piece of a short list.
inline int foreach_blocks(uint32_t chunks, int blocks_per_sm, const cuda::Target& target) {
  return static_cast<int>(
      std::min<uint32_t>(chunks * kChunkPieces, blocks_per_sm * target.multiprocessors));
}

inline int foreach_blocks(uint32_t chunks, const cuda::Target& target) {
  return foreach_blocks(chunks, kForeachBlocksPerSm, target);
}

// Calls launch_table(table, target) with the list as the smallest table that it fits.
template <class Ref, class LaunchTable>
Status launch_list(const ListOf<Ref>& list, Services& services, LaunchTable launch_table) {
  using Entry = EntryOf<Ref>;
  const auto launch = [&](auto& table, Status built) {
    table.size = static_cast<int32_t>(list.size);
    return built == Status::ok ? launch_table(table, services.target()) : built;
  };
  const auto launch_inline = [&](auto bytes) {
    InlineTable<Entry, bytes> table;
    static_assert(sizeof table <= 32764 - 256, "an op's arguments are parameters too");
    return launch(table, build_chunk_table(list, table.inline_entries, &table.chunks));
  };
  const auto fits = [&](auto bytes) { return list.size <= InlineTable<Entry, bytes>::kCapacity; };
  constexpr std::integral_constant<int, kSmallTable> small;
  constexpr std::integral_constant<int, kMediumTable> medium;
  constexpr std::integral_constant<int, kLargeTable> large;
  if (fits(small)) return launch_inline(small);
  if (takes_long_parameters()) {
    if (fits(medium)) return launch_inline(medium);
    if (fits(large)) return launch_inline(large);
  }
  DeviceTable<Entry> table;
  return launch(table, send_table(list, services, &table.device_entries, &table.chunks));
}

}  // namespace amp_ext
