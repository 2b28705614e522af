// What the executor of tests/simt assumes of a GPU, each assumption in a kernel of its own: of
// warps, blocks, clusters and mbarriers, then of matrix fragments, TMA and wgmma. probe.py calls
// the functions at the end, and probe_cases.py knows what they must give.
//
// These kernels are built for sm_90a alone, and so are not guarded against other architectures.
#include <cuda_runtime.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <tensor_map.cuh>

namespace {

using namespace amp_ext;
using ptx::Major;

struct Grid {
  int blocks;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;
  bool overlaps = false;  // starts while the kernel before it still runs
};

template <class... Params, class... Args>
int launch(const Grid& grid, void (*kernel)(Params...), const Args&... args) {
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = grid.cluster;
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = grid.overlaps;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

__device__ int thread_of_grid() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

// ---- warps -------------------------------------------------------------------------------------

__global__ void exchange(const uint32_t* from, uint32_t* to, int lane, uint32_t sought) {
  const uint32_t value = from[threadIdx.x];
  to += 6 * threadIdx.x;
  to[0] = ptx::shuffle_xor(value, lane);
  to[1] = static_cast<uint32_t>(ptx::shuffle_xor(static_cast<double>(value), lane));
  to[2] = static_cast<uint32_t>(ptx::shuffle(static_cast<float>(value), lane));
  to[3] = ptx::warp_ballot(value % 2 == 1);
  to[4] = ptx::warp_any(value == sought);
  to[5] = ptx::warp_max(value);
}

// For each of two elections whether a lane was elected, and whether another one was as well.
__global__ void elect(uint32_t* to) {
  const uint32_t first = ptx::warp_ballot(ptx::warp_elect());
  const uint32_t second = ptx::warp_ballot(ptx::warp_elect());
  to += 3 * threadIdx.x;
  to[0] = first != 0;
  to[1] = first & (first - 1);
  to[2] = first ^ second;
}

// ---- memory and copies -------------------------------------------------------------------------

__global__ void copy_through_caches(const uint4* from, uint4* to) {
  const int i = 3 * thread_of_grid();
  ptx::store16(to + i, ptx::load16<ptx::Cache::streaming>(from + i));
  ptx::store16<ptx::Cache::streaming>(to + i + 1, ptx::load16(from + i + 1));
  ptx::store16<ptx::Cache::streaming>(to + i + 2, ptx::load16<ptx::Cache::read_only>(from + i + 2));
}

constexpr int kCopyThreads = 64;

template <int kBytes>
struct alignas(kBytes) Item {
  unsigned char bytes[kBytes];
};

template <int kBytes>
struct Items {
  Item<kBytes> group[2][kCopyThreads];
};

// Each thread copies another number of bytes, and from nowhere where that is 0.
template <int kBytes>
__global__ void copy_parts(const Item<kBytes>* from, Item<kBytes>* to) {
  auto& items = ptx::shared<Items<kBytes>>();
  const int thread = static_cast<int>(threadIdx.x);
  const int bytes = thread % (kBytes + 1);
  for (int group = 0; group < 2; ++group) {
    const auto* item = from + group * kCopyThreads + thread;
    ptx::cp_async<kBytes>(&items.group[group][thread], bytes == 0 ? nullptr : item, bytes);
    ptx::cp_async_commit();
  }
  ptx::cp_async_wait<1>();
  to[thread] = items.group[0][thread];
  ptx::cp_async_wait<0>();
  to[kCopyThreads + thread] = items.group[1][thread];
}

// ---- barriers ----------------------------------------------------------------------------------

constexpr int kHalf = 64;

struct Slots {
  uint32_t at[kHalf];
};

// Half of the block hands numbers to the other half, which reverses them, through one slot each.
__global__ void hand_over(const uint32_t* from, uint32_t* to, int rounds) {
  constexpr int kFull = 1;
  constexpr int kEmpty = 2;
  auto& slots = ptx::shared<Slots>();
  const int thread = static_cast<int>(threadIdx.x) % kHalf;
  const bool produces = threadIdx.x < kHalf;
  for (int i = thread; i < rounds * kHalf; i += kHalf) {
    if (produces) {
      ptx::barrier_sync<kEmpty, 2 * kHalf>();
      ptx::store_shared(&slots.at[thread], from[i]);
      ptx::barrier_arrive<kFull, 2 * kHalf>();
    } else {
      ptx::barrier_arrive<kEmpty, 2 * kHalf>();
      ptx::barrier_sync<kFull, 2 * kHalf>();
      to[i] = slots.at[kHalf - 1 - thread];
    }
  }
}

// What a thread sees before each arrival: a phase that has not completed.
__global__ void count_arrivals(uint32_t* to, int arrivals, int phases) {
  auto& barrier = ptx::shared<ptx::Mbarrier>();
  ptx::mbarrier_init(barrier, arrivals);
  ptx::fence_mbarrier_init();
  ptx::block_sync();
  ptx::mbarrier_wait(barrier, 1);
  for (int i = 0; i < phases * arrivals; ++i) {
    const int parity = i / arrivals % 2;
    *to++ = ptx::mbarrier_try_wait(barrier, parity);
    ptx::mbarrier_arrive(barrier);
    if ((i + 1) % arrivals == 0) ptx::mbarrier_wait(barrier, parity);
  }
  *to = 1;
}

constexpr int kRingThreads = 96;
constexpr int kRingShift = 33;

struct Ring {
  ptx::Mbarrier barrier;
  uint32_t at[2][kRingThreads];
};

// Numbers move from thread to thread, ordered by the phases of an mbarrier alone.
__global__ void rotate(const uint32_t* from, uint32_t* to, int rounds) {
  auto& ring = ptx::shared<Ring>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(ring.barrier, kRingThreads);
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  uint32_t value = from[threadIdx.x];
  for (int round = 0; round < rounds; ++round) {
    ptx::store_shared(&ring.at[round % 2][threadIdx.x], value);
    ptx::mbarrier_arrive(ring.barrier);
    ptx::mbarrier_wait(ring.barrier, round % 2);
    value = ring.at[round % 2][(threadIdx.x + kRingShift) % kRingThreads];
  }
  to[threadIdx.x] = value;
}

// ---- clusters ----------------------------------------------------------------------------------

__global__ void name_blocks(uint32_t* to) {
  to[2 * blockIdx.x] = ptx::cluster_rank();
  to[2 * blockIdx.x + 1] = ptx::cluster_size();
}

// How far shared memory is from 1024-byte alignment, and from its address in block 0 of the
// cluster.
__global__ void compare_addresses(uint32_t* to) {
  const uint32_t address = ptx::shared_address(&ptx::shared<uint4>());
  to[2 * blockIdx.x] = address;
  ptx::cluster_sync();
  to[2 * blockIdx.x + 1] = address - to[2 * (blockIdx.x - ptx::cluster_rank())];
  ptx::cluster_sync();
  to[2 * blockIdx.x] = address % 1024;
}

// Each block waits for the threads of the block before it in its cluster, and adds one if the next
// phase has not completed too.
__global__ void arrive_next_door(const uint32_t* from, uint32_t* to) {
  auto& barrier = ptx::shared<ptx::Mbarrier>();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, static_cast<int>(blockDim.x));
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
  const int rank = ptx::cluster_rank();
  const int size = ptx::cluster_size();
  const int thread = thread_of_grid();
  ptx::mbarrier_arrive_cluster(barrier, (rank + 1) % size);
  ptx::mbarrier_wait(barrier, 0);
  to[thread] = from[thread] + !ptx::mbarrier_try_wait(barrier, 1);
  ptx::cluster_sync();
}

// ---- grids -------------------------------------------------------------------------------------

// The blocks take turns, the last one first; all of them fit the device at once.
__global__ void take_turns(uint32_t* counter, uint32_t* values) {
  if (threadIdx.x == 0) ptx::wait_acquire(counter, gridDim.x - 1 - blockIdx.x);
  ptx::block_sync();
  values[threadIdx.x] = 3 * values[threadIdx.x] + blockIdx.x;
  ptx::block_sync();
  if (threadIdx.x == 0) ptx::add_release(counter, 1);
}

// Writes late.
__global__ void compute_slowly(const uint32_t* from, uint32_t* to, int steps) {
  ptx::griddepcontrol_launch_dependents();
  uint32_t value = from[thread_of_grid()];
  for (int step = 0; step < steps; ++step) value = 1664525 * value + 1013904223;
  to[thread_of_grid()] = value;
}

__global__ void reverse(const uint32_t* from, uint32_t* to) {
  ptx::griddepcontrol_wait();
  to[thread_of_grid()] = from[gridDim.x * blockDim.x - 1 - thread_of_grid()];
}

// ---- registers ---------------------------------------------------------------------------------

constexpr int kWarpgroup = 128;
constexpr int kPacks = 24;

template <int kCount>
__device__ void load(uint4 (&packs)[kCount], const uint4* from) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) packs[i] = ptx::load16<ptx::Cache::read_only>(from + i);
}

__device__ uint32_t mix(uint32_t sum, uint4 a, uint4 b) {
  return 3 * sum + (a.x ^ b.x) + 5 * (a.y ^ b.y) + 7 * (a.z ^ b.z) + 11 * (a.w ^ b.w);
}

// Two warpgroups hold more registers than a third of the SM's, once the first has given up its own.
__global__ void __launch_bounds__(3 * kWarpgroup, 1)
    move_registers(const uint4* from, uint32_t* to) {
  from += 2 * kPacks * threadIdx.x;
  uint32_t sum = blockIdx.x;
  if (threadIdx.x < kWarpgroup) {
    uint4 kept[2];
    load(kept, from);
    ptx::setmaxnreg_dec<40>();
    sum = mix(sum, kept[0], kept[1]);
  } else {
    uint4 kept[kPacks];
    load(kept, from);
    ptx::setmaxnreg_inc<232>();
    uint4 more[kPacks];
    load(more, from + kPacks);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) sum = mix(sum, kept[i], more[kPacks - 1 - i]);
  }
  to[thread_of_grid()] = sum;
}

// ---- matrix fragments --------------------------------------------------------------------------

struct Rows {
  uint4 at[32];
};

// The row of which a lane gives the address: they are not in order.
__device__ int row_of_lane() { return static_cast<int>(threadIdx.x ^ 3); }

template <bool kTranspose, int kMatrices>
__global__ void load_matrices(const uint4* from, uint32_t* to) {
  auto& rows = ptx::shared<Rows>();
  ptx::store_shared(&rows.at[threadIdx.x], from[threadIdx.x]);
  ptx::block_sync();
  uint32_t fragments[kMatrices];
  ptx::ldmatrix<kTranspose>(fragments, &rows.at[row_of_lane() % (8 * kMatrices)]);
  for (int i = 0; i < kMatrices; ++i) to[kMatrices * threadIdx.x + i] = fragments[i];
}

template <bool kTranspose>
__global__ void store_matrices(const uint32_t* from, uint4* to) {
  auto& rows = ptx::shared<Rows>();
  uint32_t fragments[4];
  for (int i = 0; i < 4; ++i) fragments[i] = from[4 * threadIdx.x + i];
  ptx::stmatrix<kTranspose>(&rows.at[row_of_lane()], fragments);
  ptx::block_sync();
  to[threadIdx.x] = rows.at[threadIdx.x];
}

struct Fragments {
  float d[4];
  uint32_t a[4];
  uint32_t b[2];
};

template <class T>
__global__ void multiply_fragments(const Fragments* from, float* to) {
  Fragments at = from[threadIdx.x];
  ptx::mma_m16n8k16<T>(at.d, at.a, at.b);
  for (int i = 0; i < 4; ++i) to[4 * threadIdx.x + i] = at.d[i];
}

// ---- TMA ---------------------------------------------------------------------------------------

struct Point {
  int x, y, z;
};

constexpr int kBoxThreads = 64;

struct LoadedBox {
  alignas(1024) uint4 packs[256 + kBoxThreads];
  ptx::Mbarrier full;
};

// Dumps a box as it lies in shared memory from pack `first` on. If the barrier is told of its bytes
// only afterwards, the number behind the box says how often the phase seemed to have completed.
template <bool kExpectedFirst>
__global__ void load_box(const CUtensorMap __grid_constant__ map, uint4* to, int first, int packs,
                         Point at) {
  auto& shared = ptx::shared<LoadedBox>();
  uint4* box = shared.packs + first;
  const int bytes = packs * static_cast<int>(sizeof(uint4));
  if (threadIdx.x == 0) {
    ptx::tma_prefetch(map);
    ptx::mbarrier_init(shared.full, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
  if (threadIdx.x == 0) {
    if constexpr (kExpectedFirst) ptx::mbarrier_arrive_expect_tx(shared.full, bytes);
    ptx::tma_load(box, map, shared.full, at.x, at.y, at.z);
    if constexpr (!kExpectedFirst) {
      uint32_t completed = 0;
      for (int i = 0; i < 8; ++i) completed += ptx::mbarrier_try_wait(shared.full, 0);
      ptx::mbarrier_arrive_expect_tx(shared.full, bytes);
      to[packs] = make_uint4(completed, completed, completed, completed);
    }
  }
  ptx::mbarrier_wait(shared.full, 0);
  for (int i = threadIdx.x; i < packs; i += kBoxThreads) to[i] = box[i];
}

struct StoredBox {
  alignas(1024) uint4 packs[kBoxThreads];
};

// Each block stores, or adds, two boxes from the same place in shared memory, to z = 0 and z = 1.
template <bool kAdd>
__global__ void store_boxes(const CUtensorMap __grid_constant__ map, const uint4* from, int x,
                            int y) {
  auto& box = ptx::shared<StoredBox>();
  for (int z = 0; z < 2; ++z) {
    ptx::store_shared(&box.packs[threadIdx.x], from[kBoxThreads * z + threadIdx.x]);
    ptx::fence_proxy_async();
    ptx::block_sync();
    if (threadIdx.x == 0) {
      if constexpr (kAdd)
        ptx::tma_reduce_add(map, &box, x, y, z);
      else
        ptx::tma_store(map, &box, x, y, z);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
    ptx::block_sync();
  }
  if (threadIdx.x == 0) ptx::bulk_wait<0>();
}

struct TwoBoxes {
  alignas(1024) uint4 packs[2][kBoxThreads];
  ptx::Mbarrier full;
};

// Block r of two loads rows 8 r to 8 r + 7 into box r of the blocks in byte r of `targets`, and
// waits until `bytes` have come to itself.
__global__ void load_for_cluster(const CUtensorMap __grid_constant__ map, uint4* to, int targets,
                                 int bytes) {
  auto& boxes = ptx::shared<TwoBoxes>();
  const int rank = ptx::cluster_rank();
  for (auto& packs : boxes.packs) ptx::store_shared(&packs[threadIdx.x], make_uint4(1, 1, 1, 1));
  ptx::fence_proxy_async();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(boxes.full, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(boxes.full, bytes);
    const auto blocks = static_cast<uint16_t>(targets >> (8 * rank) & 0xff);
    ptx::tma_load_multicast(boxes.packs[rank], map, boxes.full, 0, 8 * rank, 0, blocks);
  }
  ptx::mbarrier_wait(boxes.full, 0);
  to += 2 * kBoxThreads * blockIdx.x + threadIdx.x;
  for (int box = 0; box < 2; ++box) to[kBoxThreads * box] = boxes.packs[box][threadIdx.x];
  ptx::cluster_sync();
}

// ---- wgmma -------------------------------------------------------------------------------------

constexpr int kSteps = 4;
constexpr int kStepBytes = 32;  // where k is contiguous

struct Operands {
  alignas(1024) uint4 a[1024];
  uint4 b[2048];
};

// How descriptors go through an operand; offsets in bytes.
struct Walk {
  int leading;
  int stride;
  int step;
};

template <class T>
__device__ void copy_to_shared(T& to, const uint4* from) {
  auto* packs = reinterpret_cast<uint4*>(&to);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(T) / sizeof(uint4)); i += kWarpgroup)
    ptx::store_shared(&packs[i], from[i]);
  ptx::fence_proxy_async();
  ptx::block_sync();
}

template <int kCount>
__device__ void dump(const float (&registers)[kCount], float* to) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[kCount * threadIdx.x + i] = registers[i];
}

// Dumps the sums of 64 products each and the thread's number, or NaN that must be ignored.
template <class T, int kN, Major kA, Major kB>
__global__ void __launch_bounds__(kWarpgroup, 1)
    multiply(const uint4* from, float* to, Walk walk_a, Walk walk_b, bool accumulate) {
  auto& operands = ptx::shared<Operands>();
  copy_to_shared(operands, from);
  uint64_t a = ptx::wgmma_descriptor(operands.a, walk_a.leading, walk_a.stride);
  uint64_t b = ptx::wgmma_descriptor(operands.b, walk_b.leading, walk_b.stride);
  float d[kN / 2];
  for (float& value : d) value = accumulate ? threadIdx.x : NAN;
  ptx::wgmma_fence(d);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma<T, kN, kA, kB>(d, a, b, accumulate || step > 0);
    a = ptx::wgmma_advance(a, walk_a.step);
    b = ptx::wgmma_advance(b, walk_b.step);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
  dump(d, to);
}

struct Stage {
  alignas(1024) uint4 a[512];
  uint4 b[512];
};

struct Stages {
  Stage at[2];
};

__device__ __forceinline__ void add_stage(float (&d)[32], const Stage& stage) {
  uint64_t a = ptx::wgmma_descriptor(stage.a, 0, 1024);
  uint64_t b = ptx::wgmma_descriptor(stage.b, 0, 1024);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::wgmma<__half, 64, Major::k, Major::k>(d, a, b, true);
    a = ptx::wgmma_advance(a, kStepBytes);
    b = ptx::wgmma_advance(b, kStepBytes);
  }
}

// Three groups, two at a time in flight. Once only the last one is pending, the memory that the
// others read can be overwritten, and the sums that they add to be read.
__global__ void __launch_bounds__(kWarpgroup, 1) overlap_groups(const uint4* from, float* to) {
  auto& stages = ptx::shared<Stages>();
  copy_to_shared(stages, from);
  float two_stages[32] = {}, third_stage[32] = {};
  ptx::wgmma_fence(two_stages);
  add_stage(two_stages, stages.at[0]);
  ptx::wgmma_commit();
  add_stage(two_stages, stages.at[1]);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::block_sync();
  copy_to_shared(stages.at[0], from + sizeof(Stages) / sizeof(uint4));
  ptx::wgmma_fence(third_stage);
  add_stage(third_stage, stages.at[0]);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>(two_stages);
  dump(two_stages, to);
  ptx::wgmma_wait<0>(third_stage);
  dump(third_stage, to + 32 * kWarpgroup);
}

// ---- launches ----------------------------------------------------------------------------------

// 3 matrices of 21 x 72 elements of 2 bytes, apart by more.
int map_loads(CUtensorMap* map, const void* base, uint32_t columns, uint32_t rows,
              uint32_t matrices, int swizzle) {
  return encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, const_cast<void*>(base),
                           {72, 21, 3}, {160, 24 * 160}, {columns, rows, matrices},
                           static_cast<CUtensorMapSwizzle>(swizzle));
}

template <bool kExpectedFirst>
int load_boxes(const void* from, uint4* to, int swizzle, int columns, int first, Point at) {
  constexpr int kRows = 16;
  constexpr int kMatrices = 2;
  CUtensorMap map;
  const int error = map_loads(&map, from, columns, kRows, kMatrices, swizzle);
  if (error != cudaSuccess) return error;
  const int packs = kMatrices * kRows * columns / 8;
  return launch({1, kBoxThreads, sizeof(LoadedBox)}, load_box<kExpectedFirst>, map, to, first,
                packs, at);
}

// Stores boxes of 8 x 32 to 2 matrices of 13 x 40 FP32 elements, apart by more.
template <bool kAdd>
int store(const uint4* from, void* to, int x, int y, int blocks) {
  CUtensorMap map;
  const int error =
      encode_tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, to, {40, 13, 2},
                        {48 * 4, 16 * 48 * 4}, {32, 8, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  return launch({blocks, kBoxThreads, sizeof(StoredBox)}, store_boxes<kAdd>, map, from, x, y);
}

template <class T, int kN, Major kA = Major::k, Major kB = Major::k>
int run(const uint4* from, float* to, Walk a, Walk b, bool accumulate) {
  return launch({1, kWarpgroup, sizeof(Operands)}, multiply<T, kN, kA, kB>, from, to, a, b,
                accumulate);
}

constexpr Walk kContiguous = {0, 1024, kStepBytes};

template <class T, int... kSizes>
int run_size(const uint4* from, float* to, int n) {
  int error = cudaErrorInvalidValue;
  ((n == kSizes ? void(error = run<T, kSizes>(from, to, kContiguous, kContiguous, true)) : void()),
   ...);
  return error;
}

}  // namespace

extern "C" {

int probe_warp(const uint32_t* from, uint32_t* to, int lane, int sought) {
  return launch({1, 32}, exchange, from, to, lane, sought);
}

int probe_elect(const void*, uint32_t* to) { return launch({1, 64}, elect, to); }

int probe_caches(const uint4* from, uint4* to) {
  return launch({2, 32}, copy_through_caches, from, to);
}

int probe_cp_async(const void* from, void* to, int bytes) {
  const auto copy = [&](auto kernel, auto* items) {
    using Bytes = std::remove_pointer_t<decltype(items)>;
    return launch({1, kCopyThreads, 2 * kCopyThreads * sizeof(Bytes)}, kernel,
                  static_cast<const Bytes*>(from), items);
  };
  switch (bytes) {
    case 4: return copy(copy_parts<4>, static_cast<Item<4>*>(to));
    case 8: return copy(copy_parts<8>, static_cast<Item<8>*>(to));
    case 16: return copy(copy_parts<16>, static_cast<Item<16>*>(to));
  }
  return cudaErrorInvalidValue;
}

int probe_named_barriers(const uint32_t* from, uint32_t* to, int rounds) {
  return launch({1, 2 * kHalf, sizeof(Slots)}, hand_over, from, to, rounds);
}

int probe_mbarrier_phases(const void*, uint32_t* to, int arrivals, int phases) {
  return launch({1, 1, sizeof(ptx::Mbarrier)}, count_arrivals, to, arrivals, phases);
}

int probe_mbarrier_order(const uint32_t* from, uint32_t* to, int rounds) {
  return launch({1, kRingThreads, sizeof(Ring)}, rotate, from, to, rounds);
}

int probe_mbarrier_remote(const uint32_t* from, uint32_t* to, int blocks, int cluster) {
  constexpr int kThreads = 64;
  return launch({blocks, kThreads, sizeof(ptx::Mbarrier), cluster}, arrive_next_door, from, to);
}

int probe_cluster(const void*, uint32_t* to, int blocks, int cluster) {
  return launch({blocks, 1, 0, cluster}, name_blocks, to);
}

int probe_shared_address(const void*, uint32_t* to, int blocks, int cluster) {
  return launch({blocks, 1, sizeof(uint4), cluster}, compare_addresses, to);
}

int probe_turnstile(const void*, uint32_t* to, int blocks) {
  return launch({blocks, 32}, take_turns, to, to + 1);
}

int probe_dependent_launch(const uint32_t* from, uint32_t* to, int blocks, int steps) {
  constexpr int kThreads = 64;
  const int error = launch({blocks, kThreads}, compute_slowly, from, to, steps);
  if (error != cudaSuccess) return error;
  return launch({blocks, kThreads, 0, 1, true}, reverse, to, to + kThreads * blocks);
}

int probe_setmaxnreg(const uint4* from, uint32_t* to, int blocks) {
  return launch({blocks, 3 * kWarpgroup}, move_registers, from, to);
}

int probe_ldmatrix(const uint4* from, uint32_t* to, int transpose, int matrices) {
  const auto kernel = matrices == 2
                          ? (transpose ? load_matrices<true, 2> : load_matrices<false, 2>)
                          : (transpose ? load_matrices<true, 4> : load_matrices<false, 4>);
  return launch({1, 32, sizeof(Rows)}, kernel, from, to);
}

int probe_stmatrix(const uint32_t* from, uint4* to, int transpose) {
  const auto kernel = transpose ? store_matrices<true> : store_matrices<false>;
  return launch({1, 32, sizeof(Rows)}, kernel, from, to);
}

int probe_mma(const Fragments* from, float* to, int bf16) {
  const auto kernel = bf16 ? multiply_fragments<__nv_bfloat16> : multiply_fragments<__half>;
  return launch({1, 32}, kernel, from, to);
}

int probe_tma_load(const void* from, uint4* to, int swizzle, int columns, int first, int x, int y,
                   int z) {
  return load_boxes<true>(from, to, swizzle, columns, first, {x, y, z});
}

int probe_tma_outside(const void* from, uint4* to, int swizzle, int columns, int x, int y, int z) {
  return load_boxes<true>(from, to, swizzle, columns, 0, {x, y, z});
}

int probe_mbarrier_bytes(const void* from, uint4* to) {
  return load_boxes<false>(from, to, CU_TENSOR_MAP_SWIZZLE_128B, 64, 0, {0, 0, 0});
}

int probe_tma_store(const uint4* from, void* to, int x, int y) {
  return store<false>(from, to, x, y, 1);
}

int probe_tma_reduce(const uint4* from, void* to, int x, int y, int blocks) {
  return store<true>(from, to, x, y, blocks);
}

int probe_tma_multicast(const void* from, uint4* to, int targets, int bytes) {
  CUtensorMap map;
  const int error = map_loads(&map, from, 64, 8, 1, CU_TENSOR_MAP_SWIZZLE_128B);
  if (error != cudaSuccess) return error;
  return launch({2, kBoxThreads, sizeof(TwoBoxes), 2}, load_for_cluster, map, to, targets, bytes);
}

int probe_wgmma_k_major(const uint4* from, float* to, int leading, int stride) {
  const Walk walk = {leading, stride, kStepBytes};
  return run<__half, 128>(from, to, walk, walk, true);
}

int probe_wgmma_mn_major(const uint4* from, float* to, int a_mn, int b_mn, int leading,
                         int stride) {
  const Walk walk = {leading, stride, 2 * stride};
  constexpr auto k = Major::k, mn = Major::mn;
  if (!a_mn) return run<__half, 128, k, mn>(from, to, kContiguous, walk, true);
  if (!b_mn) return run<__half, 128, mn, k>(from, to, walk, kContiguous, true);
  return run<__half, 128, mn, mn>(from, to, walk, walk, true);
}

int probe_wgmma_sizes(const uint4* from, float* to, int n, int bf16) {
  if (bf16) return run_size<__nv_bfloat16, 64, 96, 128, 160, 192, 208, 224, 256>(from, to, n);
  return run_size<__half, 64, 96, 128, 160, 192, 208, 224, 256>(from, to, n);
}

int probe_wgmma_accumulate(const uint4* from, float* to, int accumulate) {
  return run<__half, 128>(from, to, kContiguous, kContiguous, accumulate != 0);
}

int probe_wgmma_groups(const uint4* from, float* to) {
  return launch({1, kWarpgroup, sizeof(Stages)}, overlap_groups, from, to);
}

}  // extern "C"
