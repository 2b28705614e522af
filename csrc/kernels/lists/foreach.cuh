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

// A chunk table as a kernel parameter: in the parameter itself, or in device memory.
template <class Entry>
struct InlineTable {
  uint32_t chunks;
  int32_t size;
  Entry inline_entries[kInlineEntries<Entry>];
  __device__ const Entry* entries() const { return inline_entries; }
};

template <class Entry>
struct DeviceTable {
  uint32_t chunks;
  int32_t size;
  const Entry* device_entries;
  __device__ const Entry* entries() const { return device_entries; }
};

// The last entry that begins at or before `chunk`: its owner, since empty tensors come before the
// entry they share a first chunk with.
template <class Entry>
__device__ int owner_of(const Entry* entries, int size, uint32_t chunk) {
  int low = 0, high = size;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (entries[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

// How a grid's blocks share the chunks: contiguous ranges, those of the first blocks one chunk
// longer.
struct Shares {
  uint32_t per_block, longer_blocks;
  __device__ explicit Shares(uint32_t chunks)
      : per_block(chunks / gridDim.x), longer_blocks(chunks - per_block * gridDim.x) {}
  __device__ uint32_t begin(uint32_t block) const {
    return block * per_block + (block < longer_blocks ? block : longer_blocks);
  }
  __device__ uint32_t block_of(uint32_t chunk) const {
    const uint32_t of_longer = longer_blocks * (per_block + 1);  // their chunks
    return chunk < of_longer ? chunk / (per_block + 1)
                             : longer_blocks + (chunk - of_longer) / per_block;
  }
};

// Calls body(index of the entry, entry, offset, n) for each chunk of this block's share: n elements
// from `offset` on.
template <class Table, class Body>
__device__ void for_each_chunk(const Table& table, Body body) {
  const Shares shares(table.chunks);
  const uint32_t begin = shares.begin(blockIdx.x), end = shares.begin(blockIdx.x + 1);
  if (begin == end) return;
  const auto* entries = table.entries();
  int i = owner_of(entries, table.size, begin);
  for (uint32_t chunk = begin; chunk < end; ++chunk) {
    while (i + 1 < table.size && entries[i + 1].first_chunk <= chunk) ++i;
    const auto& entry = entries[i];
    const int64_t offset = static_cast<int64_t>(chunk - entry.first_chunk) * kChunkElements;
    const int64_t left = entry.numel - offset;
    body(i, entry, offset, static_cast<int>(left < kChunkElements ? left : kChunkElements));
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

// Calls body.visit(index of the tensor, T* data, int n) for each chunk of a list of tensors.
template <class Table, class Body>
__device__ void visit_chunks(const Table& table, Body& body) {
  for_each_chunk(table, [&](int i, const ChunkEntry& entry, int64_t offset, int n) {
    with_elements(entry.data, entry.dtype, [&](auto* data) { body.visit(i, data + offset, n); });
  });
}

// x = f(x) for the block's n elements, whatever their alignment; without kWrite f's result is
// dropped and memory is only read.
template <bool kWrite, class T, class F>
__device__ void for_each_element(T* data, int n, F f) {
  constexpr int kPack = Pack<T>::kSize;
  const int thread = threadIdx.x;
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(data) % 16 / sizeof(T));
  const int head = misaligned ? (n < kPack - misaligned ? n : kPack - misaligned) : 0;
  const int packs = (n - head) / kPack;
  const int tail = head + packs * kPack;

  const auto scalar = [&](int i) {
    const T result = f(data[i]);
    if constexpr (kWrite) data[i] = result;
  };
  const auto pack = [&](uint4 bits, T* at) {
    Pack<T> values = Pack<T>::from(bits);
#pragma unroll
    for (int i = 0; i < kPack; ++i) values.at[i] = f(values.at[i]);
    if constexpr (kWrite) ptx::store16(at, values.bits());
  };

  if (thread < head) scalar(thread);
  T* aligned = data + head;
  int i = thread;
  for (; i + (kPacksInFlight - 1) * kForeachThreads < packs;
       i += kPacksInFlight * kForeachThreads) {
    uint4 bits[kPacksInFlight];
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k)
      bits[k] = ptx::load16(aligned + (i + k * kForeachThreads) * kPack);
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k)
      pack(bits[k], aligned + (i + k * kForeachThreads) * kPack);
  }
  for (; i < packs; i += kForeachThreads)
    pack(ptx::load16(aligned + i * kPack), aligned + i * kPack);
  if (tail + thread < n) scalar(tail + thread);
}

// A grid that fills the device once, or one block per chunk of a short list.
inline int foreach_blocks(uint32_t chunks, const cuda::Target& target) {
  return static_cast<int>(std::min<uint32_t>(chunks, kForeachBlocksPerSm * target.multiprocessors));
}

// Calls launch_table(table, target) with the list as whichever table it fits.
template <class Ref, class LaunchTable>
Status launch_list(const ListOf<Ref>& list, Services& services, LaunchTable launch_table) {
  using Entry = EntryOf<Ref>;
  static_assert(sizeof(InlineTable<Entry>) <= 32764 - 256,
                "the table and an op's arguments share 32,764 bytes of parameters");
  const auto launch = [&](auto& table, Status built) {
    table.size = static_cast<int32_t>(list.size);
    return built == Status::ok ? launch_table(table, services.target()) : built;
  };
  if (list.size > kInlineEntries<Entry>) {
    DeviceTable<Entry> table;
    return launch(table, send_table(list, services, &table.device_entries, &table.chunks));
  }
  InlineTable<Entry> table;
  return launch(table, build_chunk_table(list, table.inline_entries, &table.chunks));
}

}  // namespace amp_ext
