// Small kernels that use one function of ptx.cuh each: test_simt_pieces.py knows their results.
#include <cuda_runtime.h>

#include <ptx.cuh>

namespace {

using namespace amp_ext;

// ---- warps and barriers ------------------------------------------------------------------------

struct Pair {
  int16_t first;
  uint8_t second;
};

// Every lane's ballot, maximum, and what it has from its neighbour and from lane 3.
__global__ void votes(const int* from, uint32_t* to) {
  const int lane = threadIdx.x, value = from[lane];
  const Pair pair{static_cast<int16_t>(value), static_cast<uint8_t>(lane)};
  const Pair neighbour = ptx::shuffle_xor(pair, 1);
  to += 5 * lane;
  to[0] = ptx::warp_ballot(value % 3 == 0);
  to[1] = ptx::warp_max(value);
  to[2] = neighbour.first;
  to[3] = neighbour.second;
  to[4] = static_cast<uint32_t>(ptx::shuffle(static_cast<double>(value), 3));
}

struct Ring {
  int slots[2][32];
};

// Warp 0 hands numbers to warp 1 through two slots, each with a barrier for full and for empty.
__global__ void hand_over(const int* from, int* to, int rounds) {
  auto& ring = ptx::shared<Ring>();
  const int lane = threadIdx.x % 32;
  const auto slot = [&](int i) -> int& { return ring.slots[i % 2][lane]; };
  if (threadIdx.x < 32) {
    for (int i = 0; i < rounds; ++i) {
      i % 2 ? ptx::barrier_sync<4, 64>() : ptx::barrier_sync<3, 64>();
      slot(i) = from[32 * i + lane];
      i % 2 ? ptx::barrier_arrive<2, 64>() : ptx::barrier_arrive<1, 64>();
    }
  } else {
    ptx::barrier_arrive<3, 64>();
    ptx::barrier_arrive<4, 64>();
    for (int i = 0; i < rounds; ++i) {
      i % 2 ? ptx::barrier_sync<2, 64>() : ptx::barrier_sync<1, 64>();
      to[32 * i + lane] = slot(i);
      if (i + 2 < rounds) i % 2 ? ptx::barrier_arrive<4, 64>() : ptx::barrier_arrive<3, 64>();
    }
  }
}

// The blocks append their numbers one after the other.
__global__ void turnstile(uint32_t* turn, int* size, int* to) {
  if (threadIdx.x != 0) return;
  ptx::wait_acquire(turn, blockIdx.x);
  to[(*size)++] = static_cast<int>(blockIdx.x);
  ptx::add_release(turn, 1);
}

// ---- cp.async ----------------------------------------------------------------------------------

constexpr int kStages = 3;
struct Stages {
  uint4 at[kStages][32];
};

// Copies in a pipeline, and sees each lane's neighbour; the last copy stops after `bytes`.
__global__ void pipeline(const uint4* from, uint4* to, int rounds, int bytes) {
  auto& stages = ptx::shared<Stages>();
  const int lane = threadIdx.x;
  const auto fetch = [&](int i) {
    if (i < rounds)
      ptx::cp_async<16>(&stages.at[i % kStages][lane], from + 32 * i + lane,
                        i == rounds - 1 ? bytes : 16);
    ptx::cp_async_commit();
  };
  for (int i = 0; i < kStages - 1; ++i) fetch(i);
  for (int i = 0; i < rounds; ++i) {
    ptx::cp_async_wait<kStages - 2>();
    ptx::block_sync();
    to[32 * i + lane] = stages.at[i % kStages][lane ^ 1];
    fetch(i + kStages - 1);
  }
  ptx::cp_async_wait<0>();
}

// ---- matrix fragments --------------------------------------------------------------------------

struct Tiles {
  uint16_t a[16][16], b[16][16];
};

// to = a b for a 16x16 matrix a and a 16x8 matrix b, whose rows or columns are contiguous.
template <class T, bool kColumns>
__global__ void product(const uint16_t* a, const uint16_t* b, float* to) {
  auto& tiles = ptx::shared<Tiles>();
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4 * 2;
  for (int i = lane; i < 256; i += 32) tiles.a[i / 16][i % 16] = a[i];
  for (int i = lane; i < 128; i += 32)
    (kColumns ? tiles.b[i / 16][i % 16] : tiles.b[i / 8][i % 8]) = b[i];
  ptx::warp_sync();
  uint32_t fragment_a[4], fragment_b[2];
  ptx::ldmatrix<false>(fragment_a, &tiles.a[lane % 16][lane / 16 * 8]);
  if constexpr (kColumns)
    ptx::ldmatrix<false>(fragment_b, &tiles.b[lane % 8][lane / 8 % 2 * 8]);
  else
    ptx::ldmatrix<true>(fragment_b, &tiles.b[lane % 16][0]);
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  ptx::mma_m16n8k16<T>(d, fragment_a, fragment_b);
  for (int i = 0; i < 4; ++i) to[8 * (g + 8 * (i / 2)) + t + i % 2] = d[i];
}

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), int blocks, int threads, size_t shared_bytes, Args... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace

extern "C" {

int piece_votes(const int* from, uint32_t* to) { return launch(votes, 1, 32, 0, from, to); }

int piece_hand_over(const int* from, int* to, int rounds) {
  return launch(hand_over, 1, 64, sizeof(Ring), from, to, rounds);
}

int piece_turnstile(uint32_t* turn, int* size, int* to, int blocks) {
  return launch(turnstile, blocks, 32, 0, turn, size, to);
}

int piece_pipeline(const uint4* from, uint4* to, int rounds, int bytes) {
  return launch(pipeline, 1, 32, sizeof(Stages), from, to, rounds, bytes);
}

int piece_product(const uint16_t* a, const uint16_t* b, float* to, int bfloat16, int columns) {
  const auto kernel = bfloat16
                          ? (columns ? product<__nv_bfloat16, true> : product<__nv_bfloat16, false>)
                          : (columns ? product<__half, true> : product<__half, false>);
  return launch(kernel, 1, 32, sizeof(Tiles), a, b, to);
}

}  // extern "C"
