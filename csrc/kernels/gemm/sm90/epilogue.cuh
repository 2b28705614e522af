// Turns a consumer's sums into the result on Hopper, box by box. TMA stores each box from shared
// memory while the next boxes are computed.
//
// Plain results, of alpha and the bias alone, have branch-free code per type. All others share one
// path by parts of 64 rows by 32 columns. TMA loads a part of c into a box, where the result
// replaces it.
#pragma once

#include "bias.cuh"
#include "part.cuh"

namespace amp_ext {

// Finishes the tiles that a consumer has summed.
template <class Gemm>
class Sm90Epilogue {
 public:
  __device__ Sm90Epilogue(Sm90Header& header, unsigned char* boxes, const Sm90Maps& maps,
                          const GemmArgs& g, const GemmPlan& plan, int consumer)
      : header_(header),
        maps_(maps),
        g_(g),
        plan_(plan),
        consumer_(consumer),
        boxes_(boxes + consumer * plan.boxes * box_bytes()),
        alpha_(static_cast<float>(g.alpha)) {}

  // Starts to load the first parts of a tile of c. `tile` has this consumer's rows.
  __device__ void prefetch(const BlockTile& tile) {
    if (!adds_c() || !is_leader()) return;
    ptx::bulk_wait_read<0>();
    Ring to = slots_;
#pragma unroll 1
    for (int i = 0; i < plan_.boxes; ++i, to.advance(plan_.boxes)) fetch_c(tile, 0, i, to.at);
  }

  // Stores the result of a tile. `bias` may be null.
  __device__ void finish(const typename Gemm::Sums& sums, const BlockTile& tile,
                         const float* bias) {
    if (!plan_.plain) return finish_parts(sums, tile, bias);
    const auto finish_as = [&](auto zero) {
      if (bias)
        finish_plain<decltype(zero), true>(sums, tile, bias);
      else
        finish_plain<decltype(zero), false>(sums, tile, bias);
    };
    if (g_.out.dtype == DType::f32)
      finish_as(float());
    else
      finish_as(typename Gemm::Element());
  }

  // Waits until the last store has read shared memory.
  __device__ void close() const {
    if (is_leader()) ptx::bulk_wait_read<0>();
  }

 private:
  static constexpr Sm90Tile kTile = Gemm::kTile;
  static constexpr int kRows = Sm90Tile::kBoxRows, kColumns = Sm90Tile::kPartColumns;
  static constexpr int kRowParts = kTile.n / kColumns;
  using Part = amp_ext::Part<kColumns>;

  __device__ static bool is_leader() { return consumer_thread() == 0; }
  __device__ bool adds_c() const { return g_.c.data && !plan_.reduce; }
  // Parts use all boxes. Returns how many previous boxes may still be read while a box is written.
  // With c, the third last box is loaded anew.
  __device__ int stores_read() const { return adds_c() ? 2 : Sm90Tile::kMostBoxes - 1; }

  // Returns how many parts of a consumer's tile have elements in the matrix.
  template <int kOfColumns = kColumns>
  __device__ int part_columns(int column) const {
    const int left = (static_cast<int>(g_.n) - column + kOfColumns - 1) / kOfColumns;
    return left < kTile.n / kOfColumns ? left : kTile.n / kOfColumns;
  }
  __device__ int part_rows(int row) const {
    const int left = (static_cast<int>(g_.m) - row + kRows - 1) / kRows;
    return left < 0 ? 0 : left < Gemm::kRowBlocks ? left : Gemm::kRowBlocks;
  }

  __device__ int box_bytes() const { return kRows * plan_.box_columns * size_of(g_.out.dtype); }
  __device__ unsigned char* box(int index) const { return boxes_ + index * box_bytes(); }

  // Loads part j of row i of c; past the end of a row it continues with the next row.
  __device__ void fetch_c(const BlockTile& tile, int i, int j, int to) {
    const int columns = part_columns(tile.column);
    for (; j >= columns; j -= columns) ++i;
    if (i >= part_rows(tile.row)) return;
    ptx::Mbarrier& full = header_.c_full[consumer_][to];
    ptx::mbarrier_arrive_expect_tx(full, box_bytes());
    ptx::tma_load(box(to), maps_.c, full, tile.column + j * kColumns, tile.row + i * kRows,
                  tile.batch);
  }

  // Selects the registers of a part by its number. Registers need constant indices.
  template <int kNumber>
  __device__ static void take(Part& x, const typename Gemm::Sums& sums) {
    constexpr int kSize = sizeof(Part) / sizeof(float);
    if constexpr (kNumber < Gemm::kRowBlocks * kRowParts)
      memcpy(&x, &sums[kNumber / kRowParts][kNumber % kRowParts * kSize], sizeof(x));
  }
  __device__ static void take(Part& x, const typename Gemm::Sums& sums, int number) {
    static_assert(Gemm::kRowBlocks * kRowParts <= 8);
    switch (number) {
      case 0: return take<0>(x, sums);
      case 1: return take<1>(x, sums);
      case 2: return take<2>(x, sums);
      case 3: return take<3>(x, sums);
      case 4: return take<4>(x, sums);
      case 5: return take<5>(x, sums);
      case 6: return take<6>(x, sums);
      case 7: return take<7>(x, sums);
    }
  }

  template <class T, bool kBias>
  __device__ void finish_plain(const typename Gemm::Sums& sums, const BlockTile& tile,
                               const float* bias) {
    constexpr int kBoxColumns = kTile.box_columns(true, sizeof(T));
    using Box = amp_ext::Part<kBoxColumns>;
    const BoxWriter<T, kBoxColumns> writer;
    const bool leads = is_leader();
    const int rows = part_rows(tile.row), columns = part_columns<kBoxColumns>(tile.column);
#pragma unroll
    for (int i = 0; i < Gemm::kRowBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kTile.n / kBoxColumns; ++j) {
        if (i >= rows || j >= columns) continue;
        Box x;
        memcpy(&x, &sums[i][j * kBoxColumns / 2], sizeof(x));
        x.scale(alpha_);
        if constexpr (kBias) x.add(bias + j * kBoxColumns);
        unsigned char* const to = boxes_ + slots_.at * kRows * kBoxColumns * int{sizeof(T)};
        writer.write(x, to);
        meet(leads, plan_.boxes - 1);
        if (leads) {
          const int x_at = tile.column + j * kBoxColumns, y_at = tile.row + i * kRows;
          if (sizeof(T) == 4 && plan_.reduce)
            ptx::tma_reduce_add(maps_.out, to, x_at, y_at, tile.batch);
          else
            ptx::tma_store(maps_.out, to, x_at, y_at, tile.batch);
          ptx::bulk_commit();
        }
        slots_.advance(plan_.boxes);
      }
    }
  }

  __device__ void finish_parts(const typename Gemm::Sums& sums, const BlockTile& tile,
                               const float* bias) {
    const int rows = part_rows(tile.row), columns = part_columns(tile.column);
    int number = 0;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
#pragma unroll 1
      for (int j = 0; j < columns; ++j, ++number, slots_.advance(plan_.boxes)) {
        Part x;
        take(x, sums, i * kRowParts + j);
        x.scale(alpha_);
        if (bias) x.add(bias + j * kColumns);
        finish_part(x, tile.batch, tile.row + i * kRows, tile.column + j * kColumns);
        // Loads c into the box of an earlier part, for the part that uses the box next.
        if (adds_c() && is_leader() && number >= stores_read())
          fetch_c(tile, i, j + plan_.boxes - stores_read(),
                  slots_.before(stores_read(), plan_.boxes));
      }
    }
  }

  __device__ void finish_part(Part& x, int batch, int row, int column) {
    unsigned char* const to = box(slots_.at);
    if (adds_c()) {
      ptx::mbarrier_wait(header_.c_full[consumer_][slots_.at], slots_.parity);
      Part c;
      with_type(g_.out.dtype, [&](auto zero) { c.read<decltype(zero)>(to); });
      ptx::warp_sync();  // stmatrix overwrites values that other lanes read
      x.add(static_cast<float>(g_.beta), c);
    }
    with_type(g_.out.dtype, [&](auto zero) { BoxWriter<decltype(zero), kColumns>().write(x, to); });
    meet(is_leader(), stores_read());
    if (is_leader()) {
      ptx::tma_store(maps_.out, to, column, row, batch);
      ptx::bulk_commit();
    }
  }

  // Meets all threads of a consumer after writing a box. Afterwards the box is complete, and at
  // most `stores` - 1 earlier stores may still read their boxes.
  __device__ void meet(bool leads, int stores) const {
    static_assert(Sm90Tile::kMostBoxes == 4);
    // Every writing thread issues the fence, since TMA reads through another proxy.
    ptx::fence_proxy_async();
    if (leads) {
      if (stores == 1)
        ptx::bulk_wait_read<0>();
      else if (stores == 2)
        ptx::bulk_wait_read<1>();
      else
        ptx::bulk_wait_read<2>();
    }
    consumer_sync(consumer_);
  }

  Sm90Header& header_;
  const Sm90Maps& maps_;
  const GemmArgs& g_;
  const GemmPlan& plan_;
  const int consumer_;
  unsigned char* const boxes_;
  const float alpha_;
  Ring slots_;  // the boxes
};

}  // namespace amp_ext
