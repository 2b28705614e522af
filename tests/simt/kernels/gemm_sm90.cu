// c = a @ b on Hopper, for a batch of matrices in FP16 or BF16, summed in FP32. Of a and of b
// either index may be the contiguous one.
//
// The grid is persistent: each block computes 128x128 tiles of c until there are none left. Of its
// three warpgroups the first one produces: a single thread has TMA fetch steps of 64 along k into a
// ring of four stages. The others consume: each multiplies 64 rows of the tile with wgmma and has
// TMA store them, while the producer already fetches the next tile.
//
// Two blocks of a cluster take tiles one below the other, which need the same columns of b: each
// block fetches half of them, for both.
#include <cuda_runtime.h>

#include <cstring>
#include <ptx_sm90.cuh>
#include <type_traits>

#include "amp_ext/swizzle.h"
#include "tensor_map.cuh"

namespace {

using namespace amp_ext;
using ptx::Major;
using ptx::Mbarrier;

constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
// Of each thread; together what the block starts with, 168 each: there are no others to be had.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
static_assert(kProducerRegisters + kConsumers * kConsumerRegisters == (1 + kConsumers) * 168);
constexpr int kTile = 128;  // rows and columns of c
constexpr int kHalf = 64;   // of kTile: the rows of a consumer
constexpr int kStep = 64;   // along k: the 128 bytes of a swizzled row
constexpr int kStages = 4;
constexpr int kInstruction = 16;  // along k, of one wgmma

// What TMA moves at a time: half of an operand's step, or half of a consumer's part of c. 64
// swizzled rows of 64 elements, whichever index is the contiguous one.
static_assert(kHalf == kStep);
template <class T>
struct alignas(kSwizzleAlignment) Box {
  T at[kHalf * kHalf];
};

template <class T>
struct Shared {
  Box<T> a[kStages][2], b[kStages][2];
  Box<T> c[kConsumers][2];
  Mbarrier full[kStages];   // TMA has written the stage
  Mbarrier empty[kStages];  // every consumer that reads what this block fetches has read it
};

template <class T>
constexpr int kStageBytes = 4 * sizeof(Box<T>);

struct Shape {
  int m, n, k, batch;
};

// Where the ring is. Each round completes one phase of each barrier.
struct Position {
  int stage = 0;
  int parity = 0;  // of the phase in which this round's stages become full

  __device__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
  __device__ int previous_stage() const { return (stage + kStages - 1) % kStages; }
};

// The tiles of a block: every gridDim.x / kCluster-th one, down the columns.
template <int kCluster>
struct Tiles {
  Shape shape;
  int rank = kCluster > 1 ? ptx::cluster_rank() : 0;

  // Calls body(first row, first column, matrix of the batch). The last tile of a column may lie
  // wholly below the matrix: then its block still feeds and follows the other one of its cluster.
  template <class Body>
  __device__ void for_each(Body body) const {
    const int down = (shape.m + kCluster * kTile - 1) / (kCluster * kTile);
    const int across = (shape.n + kTile - 1) / kTile;
    const int count = down * across * shape.batch;
    for (int i = blockIdx.x / kCluster; i < count; i += gridDim.x / kCluster)
      body((i % down * kCluster + rank) * kTile, i / down % across * kTile, i / down / across);
  }
};

__device__ int steps_of(const Shape& shape) { return (shape.k + kStep - 1) / kStep; }

// Starts to fetch the half of an operand's step that begins at this row of a or column of b, and at
// this k, to kBlocks: all of the cluster, or this one alone.
template <Major kMajor, int kBlocks, class T>
__device__ void fetch(Box<T>& to, const CUtensorMap& map, Mbarrier& full, int mn, int k, int z) {
  const int x = kMajor == Major::k ? k : mn, y = kMajor == Major::k ? mn : k;
  if constexpr (kBlocks == 1)
    ptx::tma_load(&to, map, full, x, y, z);
  else
    ptx::tma_load_multicast(&to, map, full, x, y, z, (1 << kBlocks) - 1);
}

// One thread fetches the operands of all of the block's tiles.
template <Major kA, Major kB, int kCluster, class T>
__device__ void produce(Shared<T>& shared, const CUtensorMap& a, const CUtensorMap& b,
                        const Tiles<kCluster>& tiles) {
  Position at;
  tiles.for_each([&](int row, int column, int z) {
    for (int step = 0; step < steps_of(tiles.shape); ++step, at.advance()) {
      Mbarrier& full = shared.full[at.stage];
      // Its last round has been read, here and where the multicast goes. At once in the first
      // round.
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
      // Of all that comes to the stage, from the other block of the cluster too.
      ptx::mbarrier_arrive_expect_tx(full, kStageBytes<T>);
      for (int half = 0; half < 2; ++half)
        fetch<kA, 1>(shared.a[at.stage][half], a, full, row + half * kHalf, step * kStep, z);
      for (int half = tiles.rank; half < 2; half += kCluster)
        fetch<kB, kCluster>(shared.b[at.stage][half], b, full, column + half * kHalf, step * kStep,
                            z);
    }
  });
  // The other block still arrives at these barriers: they have to outlive that.
  if constexpr (kCluster > 1)
    for (int i = 0; i < kStages; ++i, at.advance())
      ptx::mbarrier_wait(shared.empty[at.stage], at.parity ^ 1);
}

// Tells the producers of all blocks whose loads come to this stage that this warp has read it.
template <int kCluster>
__device__ void release(Mbarrier& empty) {
  const int lane = threadIdx.x % 32;
  if constexpr (kCluster == 1) {
    if (lane == 0) ptx::mbarrier_arrive(empty);
  } else {
    if (lane < kCluster) ptx::mbarrier_arrive_cluster(empty, lane);
  }
}

// Waits for the 128 threads of one consumer.
__device__ void consumer_sync(int consumer) {
  static_assert(kConsumers == 2);
  if (consumer == 0)
    ptx::barrier_sync<1, kWarpgroup>();
  else
    ptx::barrier_sync<2, kWarpgroup>();
}

// An operand in shared memory. Boxes follow each other; eight rows of 128 bytes make an atom.
template <class T>
__device__ uint64_t descriptor(const Box<T>* boxes) {
  return ptx::wgmma_descriptor(boxes, sizeof(Box<T>), kSwizzleAlignment);
}

// The bytes from one instruction's elements along k to the next one's: within the rows, or whole
// rows where k is not contiguous.
template <Major kMajor>
constexpr int kAdvance = kInstruction * (kMajor == Major::k ? 2 : kSwizzleRowBytes);

constexpr int kSums = kTile / 2;  // of a thread: 64x128 of a warpgroup

// Sums up this consumer's rows of a tile, of the operands in the stages from `at` on.
template <Major kA, Major kB, int kCluster, class T>
__device__ void multiply(Shared<T>& shared, float (&sums)[kSums], int consumer, int steps,
                         Position& at) {
  for (int step = 0; step < steps; ++step, at.advance()) {
    // What TMA wrote can be read.
    ptx::mbarrier_wait(shared.full[at.stage], at.parity);
    const uint64_t a = descriptor(&shared.a[at.stage][consumer]);
    const uint64_t b = descriptor(&shared.b[at.stage][0]);
    // The registers are as this thread left them: due at first and behind every wait.
    ptx::wgmma_fence(sums);
#pragma unroll
    for (int i = 0; i < kStep / kInstruction; ++i) {
      ptx::wgmma<T, kTile, kA, kB>(sums, ptx::wgmma_advance(a, i * kAdvance<kA>),
                                   ptx::wgmma_advance(b, i * kAdvance<kB>), step + i > 0);
    }
    ptx::wgmma_commit();
    // Only this step's may still run, so that the tensor cores always have work: the stage of the
    // step before is free.
    ptx::wgmma_wait<1>();
    if (step > 0) release<kCluster>(shared.empty[at.previous_stage()]);
  }
  // The last step's are done too, and the sums can be read.
  ptx::wgmma_wait<0>(sums);
  release<kCluster>(shared.empty[at.previous_stage()]);
}

// Two neighbouring elements of c, rounded.
template <class T>
__device__ uint32_t pack(float low, float high) {
  const auto pair = [&] {
    if constexpr (std::is_same_v<T, __half>)
      return __floats2half2_rn(low, high);
    else
      return __floats2bfloat162_rn(low, high);
  }();
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// Stores this consumer's rows of a tile, which begin at this row and column of matrix z.
template <class T>
__device__ void store(Box<T> (&boxes)[2], const CUtensorMap& c, const float (&sums)[kSums],
                      int consumer, int row, int column, int z) {
  const int thread = threadIdx.x % kWarpgroup;
  // The tile before has left the boxes: the thread that stored it waits, then tells the others.
  if (thread == 0) ptx::bulk_wait_read<0>();
  consumer_sync(consumer);

  // Four matrices of 8x8: upper and lower rows, then the same of the next 8 columns.
  const int box_row = thread / 32 * 16 + thread % 16;
#pragma unroll
  for (int i = 0; i < kTile / 16; ++i) {
    const float* s = sums + i * 8;
    const uint32_t matrices[4] = {pack<T>(s[0], s[1]), pack<T>(s[2], s[3]), pack<T>(s[4], s[5]),
                                  pack<T>(s[6], s[7])};
    const int chunk = i % 4 * 2 + thread % 32 / 16;
    auto* bytes = reinterpret_cast<unsigned char*>(&boxes[i / 4]);
    ptx::stmatrix<false>(bytes + swizzled(box_row, chunk), matrices);
  }

  // By every thread that wrote: TMA reads through another proxy.
  ptx::fence_proxy_async();
  // All have written.
  consumer_sync(consumer);
  if (thread == 0) {
    for (int half = 0; half < 2; ++half)
      ptx::tma_store(c, &boxes[half], column + half * kHalf, row, z);
    ptx::bulk_commit();
  }
}

template <Major kA, Major kB, int kCluster, class T>
__device__ void consume(Shared<T>& shared, const CUtensorMap& c, int consumer,
                        const Tiles<kCluster>& tiles) {
  Position at;
  tiles.for_each([&](int row, int column, int z) {
    float sums[kSums];
    multiply<kA, kB, kCluster>(shared, sums, consumer, steps_of(tiles.shape), at);
    store(shared.c[consumer], c, sums, consumer, row + consumer * kHalf, column, z);
  });
  // Shared memory has to outlive the last store.
  if (threadIdx.x % kWarpgroup == 0) ptx::bulk_wait_read<0>();
}

template <class T>
__device__ void init_barriers(Shared<T>& shared, int cluster) {
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(shared.full[i], 1);
    ptx::mbarrier_init(shared.empty[i], cluster * kConsumers * kWarpgroup / 32);
  }
  ptx::fence_mbarrier_init();
}

template <class T, Major kA, Major kB, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    gemm_sm90_kernel(const CUtensorMap __grid_constant__ a, const CUtensorMap __grid_constant__ b,
                     const CUtensorMap __grid_constant__ c, const Shape __grid_constant__ shape) {
  if constexpr (ptx::kSm90a) {
    auto& shared = ptx::shared<Shared<T>>();
    if (threadIdx.x == 0) {
      for (const CUtensorMap* map : {&a, &b, &c}) ptx::tma_prefetch(*map);
      init_barriers(shared, kCluster);
    }
    // Nobody uses a barrier before it is one: the other block's TMA and consumers use them too.
    if constexpr (kCluster > 1)
      ptx::cluster_sync();
    else
      ptx::block_sync();

    const Tiles<kCluster> tiles{shape};
    const int warpgroup = threadIdx.x / kWarpgroup;
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<kProducerRegisters>();
      if (threadIdx.x < 32 && ptx::warp_elect()) produce<kA, kB>(shared, a, b, tiles);
    } else {
      ptx::setmaxnreg_inc<kConsumerRegisters>();
      consume<kA, kB>(shared, c, warpgroup - 1, tiles);
    }
  }
}

// ---- the launch --------------------------------------------------------------------------------

// The map of a batch of dense row-major matrices, which TMA moves by boxes. Where a row is not a
// multiple of 16 bytes, the encoder refuses it.
template <class T>
cudaError_t encode(CUtensorMap* map, const void* data, int batch, int rows, int columns) {
  constexpr bool kHalfPrecision = std::is_same_v<T, __half>;
  const uint64_t sizes[3] = {uint64_t(columns), uint64_t(rows), uint64_t(batch)};
  const uint64_t byte_strides[2] = {sizes[0] * sizeof(T), sizes[0] * sizes[1] * sizeof(T)};
  const uint32_t box[3] = {kHalf, kHalf, 1};
  return encode_tensor_map(
      map, kHalfPrecision ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      const_cast<void*>(data), sizes, byte_strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <class T, Major kA, Major kB>
auto kernel_of(int cluster) {
  return cluster == 1 ? gemm_sm90_kernel<T, kA, kB, 1> : gemm_sm90_kernel<T, kA, kB, 2>;
}

template <class T, Major kA>
auto kernel_of(Major b, int cluster) {
  return b == Major::k ? kernel_of<T, kA, Major::k>(cluster) : kernel_of<T, kA, Major::mn>(cluster);
}

template <class T>
auto kernel_of(Major a, Major b, int cluster) {
  return a == Major::k ? kernel_of<T, Major::k>(b, cluster) : kernel_of<T, Major::mn>(b, cluster);
}

template <class T>
int launch(const void* a, const void* b, void* c, const Shape& shape, Major a_major, Major b_major,
           int cluster, int blocks) {
  const auto [m, n, k, batch] = shape;
  CUtensorMap a_map, b_map, c_map;
  for (const cudaError_t error :
       {a_major == Major::k ? encode<T>(&a_map, a, batch, m, k) : encode<T>(&a_map, a, batch, k, m),
        b_major == Major::k ? encode<T>(&b_map, b, batch, n, k) : encode<T>(&b_map, b, batch, k, n),
        encode<T>(&c_map, c, batch, m, n)}) {
    if (error != cudaSuccess) return error;
  }

  const auto kernel = kernel_of<T>(a_major, b_major, cluster);
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<T>));
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared<T>);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a_map, b_map, c_map, shape);
}

}  // namespace

// a is m x k, or k x m where m is contiguous; b is n x k where k is contiguous, or k x n; c is
// m x n. All are dense and row-major, their contiguous dimensions multiples of 8. A batch is that
// many of each, one behind the other.
extern "C" int demo_gemm_sm90(const void* a, const void* b, void* c, int m, int n, int k, int batch,
                              int a_is_mn_major, int b_is_mn_major, int bf16, int cluster,
                              int blocks) {
  if (m < 1 || n < 1 || k < 1 || batch < 1) return cudaErrorInvalidValue;
  if (cluster < 1 || cluster > 2 || blocks < 1 || blocks % cluster != 0)
    return cudaErrorInvalidValue;
  const auto launch_kernel = bf16 ? launch<__nv_bfloat16> : launch<__half>;
  return launch_kernel(a, b, c, {m, n, k, batch}, a_is_mn_major ? Major::mn : Major::k,
                       b_is_mn_major ? Major::mn : Major::k, cluster, blocks);
}
