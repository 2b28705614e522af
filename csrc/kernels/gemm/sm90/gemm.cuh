// Defines the sm_90a GEMM kernel and launches its instances for one operand type.
//
// The grid is persistent: blocks take units of work until none is left. The first of a block's
// three warpgroups produces, the others consume.
#pragma once

#include "epilogue.cuh"
#include "gemm/shared/instances.h"
#include "gemm/shared/split.cuh"
#include "launch.cuh"
#include "tensor_map.cuh"

namespace amp_ext {

template <class Gemm>
__device__ void consume(Sm90Header& header, unsigned char* boxes, const unsigned char* stages,
                        const Sm90Maps& maps, const GemmArgs& g, const GemmPlan& plan, int consumer,
                        unsigned char* workspace, uint32_t* tickets) {
  constexpr Sm90Tile kTile = Gemm::kTile;
  Sm90Epilogue<Gemm> epilogue(header, boxes, maps, g, plan, consumer);
  const int first_row = kTile.ping_pong ? 0 : consumer * kTile.consumer_m();
  for (uint32_t round = 0;; ++round) {
    const Sm90Unit unit = read_unit(header, round);
    if (unit.steps == 0) break;
    if (kTile.ping_pong && round % Sm90Tile::kConsumers != consumer) continue;
    BlockTile tile = unit.tile;
    tile.row += first_row;
    if (plan.splits == 1) epilogue.prefetch(tile);
    // Ping-pong consumers alternate: one begins after the other has passed all its steps, since
    // parity cannot tell a stage's phase from the one two before. Tensor cores thus compute one
    // tile at a time, back to back.
    const int turn = round / Sm90Tile::kConsumers % 2;
    if (kTile.ping_pong) ptx::mbarrier_wait(header.turn[consumer], consumer == 0 ? turn ^ 1 : turn);
    typename Gemm::Sums sums;
    forget(sums);
    accumulate<Gemm>(sums, header, stages, plan, first_row, unit.steps, unit.stages, [&] {
      if (kTile.ping_pong && threadIdx.x % 32 == 0) ptx::mbarrier_arrive(header.turn[consumer ^ 1]);
    });
    const StagedBias bias(header, g, round);
    if (plan.splits > 1) {
      const uint32_t part = unit.number * Gemm::kTeam + (Gemm::kTeam > 1 ? consumer : 0);
      const auto is_last = [&] {
        return is_last_consumer(tickets + part, plan.splits, header.last[consumer], consumer);
      };
      if (!add_shares<kWarpgroup>(sums, workspace, part, unit.share, plan.splits, consumer_thread(),
                                  is_last))
        continue;
      epilogue.prefetch(tile);
    }
    epilogue.finish(sums, tile, bias.columns());
  }
  epilogue.close();
}

template <class Gemm>
__device__ void init_barriers(Sm90Header& header, const GemmArgs& g, const GemmPlan& plan) {
  constexpr int kTeamWarps = Gemm::kTeam * kWarpgroup / 32;
  for (int i = 0; i < plan.stages; ++i) {
    ptx::mbarrier_init(header.full[i], 1);
    ptx::mbarrier_init(header.empty[i], kTeamWarps);
  }
  for (ptx::Mbarrier& turn : header.turn) ptx::mbarrier_init(turn, kWarpgroup / 32);
  for (auto& of_consumer : header.c_full)
    for (int i = 0; i < plan.boxes; ++i) ptx::mbarrier_init(of_consumer[i], 1);
  constexpr int kConsumerWarps = Sm90Tile::kConsumers * kWarpgroup / 32;
  for (ptx::Mbarrier& full : header.unit_full) ptx::mbarrier_init(full, 1);
  for (ptx::Mbarrier& empty : header.unit_empty)
    ptx::mbarrier_init(empty, kConsumerWarps + (g.bias.data ? 1 : 0));
  for (ptx::Mbarrier& full : header.bias_full) ptx::mbarrier_init(full, 1);
  for (ptx::Mbarrier& empty : header.bias_empty) ptx::mbarrier_init(empty, kTeamWarps);
  ptx::fence_mbarrier_init();
}

template <class T, int kTileIndex, Major kA, Major kB>
__global__ void __launch_bounds__(Sm90Tile::kThreads, 1)
    gemm_sm90_kernel(const Sm90Maps __grid_constant__ maps, const GemmArgs __grid_constant__ args,
                     const GemmPlan __grid_constant__ plan, unsigned char* workspace,
                     uint32_t* tickets) {
  if constexpr (ptx::kSm90a) {
    using Gemm = Sm90Gemm<T, kTileIndex, kA, kB>;
    constexpr Sm90Tile kTile = Gemm::kTile;
    auto& header = ptx::shared<Sm90Header>();
    auto* const boxes = reinterpret_cast<unsigned char*>(&header + 1);
    const int box_bytes = Sm90Tile::kBoxRows * plan.box_columns * size_of(args.out.dtype);
    auto* const stages = boxes + Sm90Tile::boxes_bytes(plan.boxes, box_bytes);
    if (threadIdx.x == 0) {
      for (const CUtensorMap* map : {&maps.a, &maps.b, &maps.out}) ptx::tma_prefetch(*map);
      init_barriers<Gemm>(header, args, plan);
    }
    ptx::wait_for_previous_grid();
    ptx::block_sync();  // all barriers are initialised before any use

    const int warpgroup = threadIdx.x / kWarpgroup;
    if (warpgroup == 0) {
      ptx::setmaxnreg_dec<Sm90Tile::kProducerRegisters>();
      const int warp = threadIdx.x / 32;
      if (warp == 0 && ptx::warp_elect()) produce<Gemm>(header, stages, maps, args, plan);
      if (warp == 1 && args.bias.data) stage_bias<Gemm>(header, args);
    } else {
      ptx::setmaxnreg_inc<Sm90Tile::kConsumerRegisters>();
      consume<Gemm>(header, boxes, stages, maps, args, plan, warpgroup - 1, workspace, tickets);
    }
  }
}

// ---- the launch --------------------------------------------------------------------------------

// Encodes the map of `count` matrices of `lines` lines of `length` contiguous elements. A dimension
// of size 1 has a dense stride, since its stride may be arbitrary. A batch stride of 0 repeats one
// matrix.
inline bool encode(CUtensorMap& map, const MatrixRef& x, int64_t length, int64_t lines,
                   int64_t line_stride, int64_t count, uint32_t box_length, uint32_t box_lines) {
  constexpr CUtensorMapDataType kTypes[] = {CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                            CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                            CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};
  const uint64_t bytes = size_of(x.dtype);
  const bool one_matrix = count == 1 || x.batch_stride == 0;
  const uint64_t sizes[3] = {static_cast<uint64_t>(length), static_cast<uint64_t>(lines),
                             one_matrix ? 1 : static_cast<uint64_t>(count)};
  const uint64_t line_bytes = lines == 1 ? (length * bytes + 15) / 16 * 16 : line_stride * bytes;
  const uint64_t strides[2] = {line_bytes,
                               one_matrix ? line_bytes * lines : x.batch_stride * bytes};
  const uint32_t box[3] = {box_length, box_lines, 1};
  const auto swizzle =
      box_length * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode_tensor_map(&map, kTypes[static_cast<int>(x.dtype)], x.data, sizes, strides, box,
                           swizzle) == cudaSuccess;
}

template <class Operand>
bool encode_operand(CUtensorMap& map, const MatrixRef& x, int64_t mn, int64_t mn_stride, int64_t k,
                    int64_t k_stride, int64_t count) {
  return Operand::kByK ? encode(map, x, k, mn, mn_stride, count, kAtom, Operand::kLines)
                       : encode(map, x, mn, k, k_stride, count, kAtom, Operand::kLines);
}

template <class Gemm>
bool encode_maps(Sm90Maps& maps, const GemmArgs& g, const GemmPlan& plan) {
  const auto result = [&](CUtensorMap& map, const MatrixRef& x) {
    return encode(map, x, g.n, g.m, x.row_stride, g.batch, plan.box_columns, Sm90Tile::kBoxRows);
  };
  const int64_t products = g.batch * g.terms;
  return encode_operand<typename Gemm::A>(maps.a, g.a, g.m, g.a.row_stride, g.k, g.a.column_stride,
                                          products) &&
         encode_operand<typename Gemm::B>(maps.b, g.b, g.n, g.b.column_stride, g.k, g.b.row_stride,
                                          products) &&
         result(maps.out, g.out) && (!g.c.data || result(maps.c, g.c));
}

template <class T>
struct Sm90Kernel {
  template <int kTileIndex, Major kA, Major kB>
  static Status launch_one(const GemmArgs& args, const GemmPlan& plan, void* workspace,
                           uint32_t* tickets, cuda::Stream stream) {
    constexpr auto kernel = gemm_sm90_kernel<T, kTileIndex, kA, kB>;
    // This query binds the device's context to a new thread, as the encoder requires.
    (void)waits_for_previous_grid(reinterpret_cast<const void*>(kernel));
    Sm90Maps maps{};
    if (!encode_maps<Sm90Gemm<T, kTileIndex, kA, kB>>(maps, args, plan))
      return Status::no_tensor_map;
    // The limit covers every plan.
    if (allow_shared_bytes<kernel, Sm90Tile::kSharedBytes>() != cudaSuccess)
      return Status::launch_failed;
    return launch(kernel, static_cast<int>(plan.blocks), Sm90Tile::kThreads, plan.shared_bytes,
                  stream, maps, args, plan, static_cast<unsigned char*>(workspace), tickets);
  }
};

template <class T>
Status launch_sm90(const GemmArgs& args, const GemmPlan& plan, void* workspace, uint32_t* tickets,
                   cuda::Stream stream) {
  return launch_instance<Sm90Kernel<T>>(std::make_integer_sequence<int, kSm90TileCount>{}, args,
                                        plan, workspace, tickets, stream);
}

}  // namespace amp_ext
