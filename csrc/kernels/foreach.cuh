// The walk of a tensor list by one launch: a persistent grid over the list's chunks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <ptx.cuh>
#include <type_traits>

#include "amp_ext/launch.h"
#include "pack.cuh"

namespace amp_ext {

constexpr int kForeachThreads = 512;
constexpr int kForeachBlocksPerSm = 2;
constexpr int kPacksInFlight = 4;  // 16-byte loads a thread issues before the first use

// A chunk table as a kernel parameter: in the parameter itself, or in device memory.
struct InlineTable {
  uint32_t chunks;
  int32_t size;
  ChunkEntry inline_entries[kInlineTensors];
  __device__ const ChunkEntry* entries() const { return inline_entries; }
};

struct DeviceTable {
  uint32_t chunks;
  int32_t size;
  const ChunkEntry* device_entries;
  __device__ const ChunkEntry* entries() const { return device_entries; }
};

static_assert(sizeof(InlineTable) <= 32764 - 256,
              "the table and an op's arguments share 32,764 bytes of parameters");

// The last entry that begins at or before `chunk`: its owner, since empty tensors come before the
// entry they share a first chunk with.
__device__ inline int owner_of(const ChunkEntry* entries, int size, uint32_t chunk) {
  int low = 0, high = size;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (entries[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

// How a grid's blocks share the chunks: contiguous ranges, the first `rest` of them one chunk
// longer.
struct Shares {
  uint32_t chunks, rest;
  __device__ explicit Shares(uint32_t all)
      : chunks(all / gridDim.x), rest(all - chunks * gridDim.x) {}
  __device__ uint32_t begin(uint32_t block) const {
    return block * chunks + (block < rest ? block : rest);
  }
  __device__ uint32_t block_of(uint32_t chunk) const {
    const uint32_t longer = rest * (chunks + 1);  // chunks of the longer ranges
    return chunk < longer ? chunk / (chunks + 1) : rest + (chunk - longer) / chunks;
  }
};

// Calls body.visit(index of the tensor, T* data, int n) for each chunk of this block's share.
template <class Table, class Body>
__device__ void for_each_chunk(const Table& table, Body& body) {
  const Shares shares(table.chunks);
  const uint32_t begin = shares.begin(blockIdx.x), end = shares.begin(blockIdx.x + 1);
  if (begin == end) return;
  const ChunkEntry* entries = table.entries();
  int i = owner_of(entries, table.size, begin);
  for (uint32_t chunk = begin; chunk < end; ++chunk) {
    while (i + 1 < table.size && entries[i + 1].first_chunk <= chunk) ++i;
    const ChunkEntry& entry = entries[i];
    const int64_t offset = static_cast<int64_t>(chunk - entry.first_chunk) * kChunkElements;
    const int64_t left = entry.numel - offset;
    const int n = static_cast<int>(left < kChunkElements ? left : kChunkElements);
    void* data = ptx::global(entry.data);
    switch (entry.dtype) {
      case DType::f32: body.visit(i, static_cast<float*>(data) + offset, n); break;
      case DType::f16: body.visit(i, static_cast<__half*>(data) + offset, n); break;
      case DType::bf16: body.visit(i, static_cast<__nv_bfloat16*>(data) + offset, n); break;
      case DType::f64: body.visit(i, static_cast<double*>(data) + offset, n); break;
    }
  }
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

template <class... Params, class... Args>
Status launch(void (*kernel)(Params...), int blocks, int threads, size_t shared_bytes,
              cuda::Stream stream, const Args&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, args...) == cudaSuccess ? Status::ok
                                                                     : Status::launch_failed;
}

// A grid that fills the device once, or one block per chunk of a short list.
inline Status foreach_blocks(uint32_t chunks, int* blocks) {
  int device = 0, multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) !=
          cudaSuccess) {
    return Status::launch_failed;
  }
  *blocks = static_cast<int>(std::min<uint32_t>(chunks, kForeachBlocksPerSm * multiprocessors));
  return Status::ok;
}

// Hands the list to launch_table(table) as whichever table there is.
template <class LaunchTable>
Status with_table(const TensorList& list, LaunchTable launch_table) {
  if (list.device_table) {
    return launch_table(
        DeviceTable{list.device_chunks, static_cast<int32_t>(list.size), list.device_table});
  }
  if (list.size > kInlineTensors) return Status::list_too_long;
  InlineTable table;
  table.size = static_cast<int32_t>(list.size);
  const Status built =
      build_chunk_table(list.tensors, list.size, table.inline_entries, &table.chunks);
  return built == Status::ok ? launch_table(table) : built;
}

}  // namespace amp_ext
