// Small kernels that use a few functions of ptx_sm90.cuh each: test_simt_sm90.py knows their
// results.
#include <cuda_runtime.h>

#include <algorithm>
#include <ptx_sm90.cuh>

#include "tensor_map.cuh"

namespace {

using namespace amp_ext;
using ptx::Major;

constexpr int kWarpgroup = 128;

struct alignas(1024) Box {
  unsigned char bytes[32768];
};

// ---- TMA ---------------------------------------------------------------------------------------

struct OneBox {
  Box box;
  ptx::Mbarrier full;
};

__device__ void init(ptx::Mbarrier& barrier, int arrivals) {
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, arrivals);
    ptx::fence_mbarrier_init();
  }
  ptx::block_sync();
}

// Loads a box, shows how it lies in shared memory, and stores or adds it elsewhere.
__global__ void copy_box(const CUtensorMap __grid_constant__ from,
                         const CUtensorMap __grid_constant__ to, unsigned char* raw, int bytes,
                         int3 source, int3 target, bool add) {
  auto& shared = ptx::shared<OneBox>();
  init(shared.full, 1);
  if (threadIdx.x < 32 && ptx::warp_elect()) {
    ptx::tma_prefetch(from);
    ptx::mbarrier_arrive_expect_tx(shared.full, bytes);
    ptx::tma_load(&shared.box, from, shared.full, source.x, source.y, source.z);
  }
  ptx::mbarrier_wait(shared.full, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) raw[i] = shared.box.bytes[i];
  if (threadIdx.x != 0) return;
  for (int i = 0; i < (add ? 2 : 1); ++i) {
    if (add)
      ptx::tma_reduce_add(to, &shared.box, target.x, target.y, target.z);
    else
      ptx::tma_store(to, &shared.box, target.x, target.y, target.z);
    ptx::bulk_commit();
  }
  ptx::bulk_wait_read<0>();
}

struct Halves {
  alignas(128) uint32_t at[2][32];
  ptx::Mbarrier full, empty;
};

// Each block of a cluster loads a half for both, round after round.
__global__ void multicast(const CUtensorMap __grid_constant__ from, uint32_t* to, int rounds) {
  auto& shared = ptx::shared<Halves>();
  const int rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(shared.full, 1);
    ptx::mbarrier_init(shared.empty, ptx::cluster_size());
    ptx::fence_mbarrier_init();
  }
  ptx::cluster_sync();
  for (int i = 0; i < rounds; ++i) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_wait(shared.empty, (i + 1) % 2);
      ptx::mbarrier_arrive_expect_tx(shared.full, sizeof(shared.at));
      ptx::tma_load_multicast(&shared.at[rank], from, shared.full, 0, 2 * i + rank, 0, 0b11);
    }
    while (!ptx::mbarrier_try_wait(shared.full, i % 2)) {
    }
    for (int half = 0; half < 2; ++half)
      to[((i * 2 + rank) * 2 + half) * 32 + threadIdx.x] = shared.at[half][threadIdx.x];
    ptx::warp_sync();
    if (threadIdx.x < 2) ptx::mbarrier_arrive_cluster(shared.empty, static_cast<int>(threadIdx.x));
  }
  ptx::cluster_sync();
}

// ---- wgmma -------------------------------------------------------------------------------------

constexpr int kRows = 64, kDepth = 64;
constexpr int kAtomBytes = 1024;
constexpr int kTileBytes = kDepth * 128;  // of 64 elements of m or n where k is not contiguous

struct Operands {
  alignas(1024) unsigned char a[kTileBytes], b[4 * kTileBytes];
  ptx::Mbarrier full;
};

template <Major kMajor>
__device__ uint64_t operand(const void* tile, int k) {
  return ptx::wgmma_advance(ptx::wgmma_descriptor(tile, kTileBytes, kAtomBytes),
                            kMajor == Major::k ? k * 2 : k * 128);
}

// to = 1 + a b for kRows x kDepth and kDepth x kN elements.
template <class T, int kN, Major kA, Major kB>
__global__ void product(const CUtensorMap __grid_constant__ a,
                        const CUtensorMap __grid_constant__ b, float* to) {
  auto& shared = ptx::shared<Operands>();
  constexpr int kTiles = kB == Major::mn ? (kN + 63) / 64 : 1;
  constexpr int kBytesB = kB == Major::mn ? kTiles * kTileBytes : kN * 128;
  init(shared.full, 1);
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(shared.full, kTileBytes + kBytesB);
    ptx::tma_load(shared.a, a, shared.full, 0, 0, 0);
    for (int i = 0; i < kTiles; ++i)
      ptx::tma_load(shared.b + i * kTileBytes, b, shared.full, 64 * i, 0, 0);
  }
  ptx::mbarrier_wait(shared.full, 0);
  float d[kN / 2];
  for (float& x : d) x = 1.0f;
  ptx::wgmma_fence(d);
  for (int k = 0; k < kDepth; k += 16)
    ptx::wgmma<T, kN, kA, kB>(d, operand<kA>(shared.a, k), operand<kB>(shared.b, k), true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4 * 2;
  for (int i = 0; i < kN / 2; ++i)
    to[(16 * warp + g + 8 * (i / 2 % 2)) * kN + 8 * (i / 4) + t + i % 2] = d[i];
}

using Product = void (*)(const CUtensorMap&, const CUtensorMap&, float*);

template <class T, Major kA, Major kB>
Product product_of(int n) {
  switch (n) {
    case 64: return product<T, 64, kA, kB>;
    case 96: return product<T, 96, kA, kB>;
    case 128: return product<T, 128, kA, kB>;
    case 160: return product<T, 160, kA, kB>;
    case 192: return product<T, 192, kA, kB>;
    case 208: return product<T, 208, kA, kB>;
    case 224: return product<T, 224, kA, kB>;
    default: return product<T, 256, kA, kB>;
  }
}

template <class T>
Product product_of(int n, bool a_is_mn_major, bool b_is_mn_major) {
  if (a_is_mn_major)
    return b_is_mn_major ? product_of<T, Major::mn, Major::mn>(n)
                         : product_of<T, Major::mn, Major::k>(n);
  return b_is_mn_major ? product_of<T, Major::k, Major::mn>(n)
                       : product_of<T, Major::k, Major::k>(n);
}

// ---- the rest ----------------------------------------------------------------------------------

struct Matrices {
  alignas(16) uint16_t from[32][8], to[32][8];
};

// Transposes four 8x8 matrices twice or once.
template <bool kLoad, bool kStore>
__global__ void transpose(const uint16_t* from, uint16_t* to) {
  auto& shared = ptx::shared<Matrices>();
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) shared.from[lane][i] = from[8 * lane + i];
  ptx::warp_sync();
  uint32_t fragments[4];
  ptx::ldmatrix<kLoad>(fragments, shared.from[lane]);
  ptx::stmatrix<kStore>(shared.to[lane], fragments);
  ptx::warp_sync();
  for (int i = 0; i < 8; ++i) to[8 * lane + i] = shared.to[lane][i];
}

// The first warpgroup gives its registers to the others.
__global__ void registers(int* count) {
  if (threadIdx.x < kWarpgroup)
    ptx::setmaxnreg_dec<40>();
  else
    ptx::setmaxnreg_inc<232>();
  if (threadIdx.x % kWarpgroup == 0) ptx::add_release(reinterpret_cast<uint32_t*>(count), 1);
}

// ---- launches ----------------------------------------------------------------------------------

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), int cluster, int threads, size_t shared_bytes, Args... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(cluster);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  return error ? error : cudaLaunchKernelEx(&config, kernel, args...);
}

// A tensor and its boxes, as Python gives them.
struct Tensor {
  void* data;
  int type, swizzle;
  int size[3], strides[2], box[3];
};

struct Map {
  CUtensorMap map;
  cudaError_t error;
};

Map encode(const Tensor& tensor) {
  Map result{};
  uint64_t sizes[3], strides[2];
  uint32_t box[3];
  std::copy_n(tensor.size, 3, sizes);
  std::copy_n(tensor.strides, 2, strides);
  std::copy_n(tensor.box, 3, box);
  result.error =
      encode_tensor_map(&result.map, static_cast<CUtensorMapDataType>(tensor.type), tensor.data,
                        sizes, strides, box, static_cast<CUtensorMapSwizzle>(tensor.swizzle));
  return result;
}

}  // namespace

extern "C" {

int piece_encode(const Tensor* tensor) { return encode(*tensor).error; }

int piece_copy_box(const Tensor* from, const Tensor* to, unsigned char* raw, int bytes,
                   const int3* source, const int3* target, int add) {
  const Map a = encode(*from), b = encode(*to);
  if (a.error || b.error) return a.error | b.error;
  return launch(copy_box, 1, 64, sizeof(OneBox), a.map, b.map, raw, bytes, *source, *target,
                add != 0);
}

int piece_multicast(const Tensor* from, uint32_t* to, int rounds) {
  return launch(multicast, 2, 32, sizeof(Halves), encode(*from).map, to, rounds);
}

int piece_wgmma(const Tensor* a, const Tensor* b, float* to, int n, int bfloat16, int a_is_mn_major,
                int b_is_mn_major) {
  const auto kernel = (bfloat16 ? product_of<__nv_bfloat16>
                                : product_of<__half>)(n, a_is_mn_major != 0, b_is_mn_major != 0);
  return launch(kernel, 1, kWarpgroup, sizeof(Operands), encode(*a).map, encode(*b).map, to);
}

int piece_transpose(const uint16_t* from, uint16_t* to, int load, int store) {
  const auto kernel = load ? (store ? transpose<true, true> : transpose<true, false>)
                           : (store ? transpose<false, true> : transpose<false, false>);
  return launch(kernel, 1, 32, sizeof(Matrices), from, to);
}

int piece_registers(int* count) { return launch(registers, 1, 3 * kWarpgroup, 0, count); }

}  // extern "C"
