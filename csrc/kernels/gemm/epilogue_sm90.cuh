// From a consumer's sums to the result on Hopper, part by part: 64 rows by 32 columns, of which a
// thread has 16 elements in registers. Each part goes through a box of shared memory to TMA, which
// stores it while the next ones are computed. A part of c, or of the aux of a derivative, comes the
// same way and is replaced in its box by the result.
#pragma once

#include <cstring>

#include "../pack.cuh"
#include "../reduce.cuh"
#include "activation.cuh"
#include "mainloop_sm90.cuh"

namespace amp_ext {

// The calling thread's number in its consumer. Read anew: nothing that follows from it is held in
// registers beside the sums.
__device__ inline int consumer_thread() { return ptx::thread_index() % kWarpgroup; }

// Waits for the 128 threads of one consumer; orders their memory accesses.
__device__ inline void consumer_sync(int consumer) {
  static_assert(Sm90Tile::kConsumers == 2);
  if (consumer == 0)
    ptx::barrier_sync<1, kWarpgroup>();
  else
    ptx::barrier_sync<2, kWarpgroup>();
}

// As is_last_block, of consumers.
__device__ inline bool is_last_consumer(uint32_t* ticket, uint32_t consumers, bool& shared,
                                        int consumer) {
  consumer_sync(consumer);
  if (consumer_thread() == 0) {
    ptx::device_fence();
    shared = ptx::ticket(ticket, consumers - 1) == consumers - 1;
    ptx::device_fence();
  }
  consumer_sync(consumer);
  return shared;
}

// A consumer's sums of each of a tile's shares, in the workspace: a thread's in packs of four, those
// of neighbours side by side.
template <class Gemm>
class Shares {
 public:
  __device__ Shares(const GemmPlan& plan, const GemmWork& work, int consumer,
                    unsigned char* workspace)
      : splits_(work.splits) {
    const int cluster = plan.cluster_m * plan.cluster_n;
    const int rank = cluster > 1 ? ptx::cluster_rank() : 0;
    const int64_t tile = work.tile - plan.whole;
    const int member = Gemm::kTeam > 1 ? consumer : 0;
    consumers_ = cluster * Gemm::kTeam;
    number_ = tile * consumers_ + rank * Gemm::kTeam + member;
    first_ = reinterpret_cast<uint4*>(workspace) +
             (tile * splits_ * consumers_ + rank * Gemm::kTeam + member) * kPacks * kWarpgroup;
  }

  __device__ uint32_t count() const { return splits_; }
  // That of this consumer's tickets.
  __device__ int64_t number() const { return number_; }

  __device__ void store(const typename Gemm::Sums& sums, uint32_t split) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      uint4 bits;
      memcpy(&bits, &sums[i * 4 / kRowSums][i * 4 % kRowSums], sizeof(bits));
      ptx::store16(at(split, i), bits);
    }
  }

  // Adds the shares of a part up, in their order.
  template <int kSize>
  __device__ void sum(float (&x)[kSize], int number) const {
    memset(x, 0, sizeof(x));
    for (uint32_t split = 0; split < splits_; ++split) {
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
        const uint4 bits = ptx::load_l2(at(split, (number * kSize + i) / 4));
        float share[4];
        memcpy(share, &bits, sizeof(bits));
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i + j] += share[j];
      }
    }
  }

 private:
  static constexpr int kRowSums = Gemm::kTile.n / 2;
  static constexpr int64_t kPacks = Gemm::kRowBlocks * kRowSums / 4;

  __device__ uint4* at(uint32_t split, int pack) const {
    return first_ + (split * consumers_ * kPacks + pack) * kWarpgroup + consumer_thread();
  }

  const uint32_t splits_;
  int consumers_;  // that each have some of a tile
  int64_t number_;
  uint4* first_;
};

// Calls use(T()) with an element of the type.
template <class Use>
__device__ void with_type(DType dtype, Use use) {
  if (dtype == DType::f32) return use(float());
  if (dtype == DType::f16) return use(__half());
  use(__nv_bfloat16());
}

// Where a thread's elements of a part are: of lane l of warp w, element 4 c + 2 h + i in row
// 16 w + l / 4 + 8 h and column 8 c + 2 (l % 4) + i.
class PartPlace {
 public:
  __device__ PartPlace() : thread_(consumer_thread()) {}
  __device__ int row(int i) const { return thread_ / 32 * 16 + thread_ % 32 / 4 + i / 2 % 2 * 8; }
  __device__ int column(int i) const { return i / 4 * 8 + thread_ % 4 * 2 + i % 2; }

 private:
  int thread_;
};

// A thread's elements of a part.
struct Part {
  static constexpr int kSize = 16;
  static constexpr int kGroup = 4;  // of 8 columns
  float at[kSize];

  // The group at the beginning; when it is put back, the next one is there. All groups have had
  // their turn after as many calls as there are groups.
  __device__ void take_group(float (&group)[kGroup]) const { memcpy(group, at, sizeof(group)); }
  __device__ void put_group(const float (&group)[kGroup]) {
#pragma unroll
    for (int i = 0; i < kSize - kGroup; ++i) at[i] = at[i + kGroup];
    memcpy(at + kSize - kGroup, group, sizeof(group));
  }

  // Reads a thread's elements of 8 columns from a box of T.
  template <class T>
  __device__ static void read(float (&group)[kGroup], const unsigned char* box, int number) {
    constexpr int kRowBytes = Sm90Tile::kBoxColumns * sizeof(T);
    const PartPlace place;
#pragma unroll
    for (int i = 0; i < kGroup; i += 2) {
      const int byte = place.column(number * kGroup + i) * static_cast<int>(sizeof(T));
      T pair[2];
      memcpy(pair, box + swizzled<kRowBytes>(place.row(i), byte / 16) + byte % 16, sizeof(pair));
      group[i] = Element<T>::widen(pair[0]);
      group[i + 1] = Element<T>::widen(pair[1]);
    }
  }

  // Rounds them and writes them to a box of T.
  template <class T>
  __device__ void write(unsigned char* box) const {
    constexpr int kRowBytes = Sm90Tile::kBoxColumns * sizeof(T);
    if constexpr (sizeof(T) == 4) {
      const PartPlace place;
#pragma unroll
      for (int i = 0; i < kSize; i += 2) {
        const int byte = place.column(i) * 4;
        auto* to = box + swizzled<kRowBytes>(place.row(i), byte / 16) + byte % 16;
        ptx::store_shared(reinterpret_cast<float2*>(to), float2{at[i], at[i + 1]});
      }
    } else {
      const int thread = consumer_thread(), lane = thread % 32;
      const int row = thread / 32 * 16 + lane % 16;
      // Four matrices of 8x8 at a time: upper and lower rows, then the same of the next 8 columns.
#pragma unroll
      for (int i = 0; i < kSize; i += 8) {
        uint32_t matrices[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const T pair[2] = {Element<T>::round(at[i + j * 2]), Element<T>::round(at[i + j * 2 + 1])};
          memcpy(&matrices[j], pair, sizeof(pair));
        }
        ptx::stmatrix<false>(box + swizzled<kRowBytes>(row, i / 4 + lane / 16), matrices);
      }
    }
  }
};

// What a consumer does with the tiles that it has summed up.
template <class Gemm>
class Sm90Epilogue {
 public:
  __device__ Sm90Epilogue(Sm90Header& header, unsigned char* boxes, const Sm90Maps& maps,
                          const GemmArgs& g, const GemmPlan& plan, int consumer,
                          unsigned char* workspace, uint32_t* tickets)
      : header_(header),
        maps_(maps),
        g_(g),
        plan_(plan),
        consumer_(consumer),
        box_bytes_(Sm90Tile::box_bytes(size_of(g.out.dtype))),
        boxes_(boxes + consumer * plan.boxes * box_bytes_),
        workspace_(workspace),
        tickets_(tickets),
        slots_{plan.boxes / slot_boxes()},
        next_side_{plan.boxes} {}

  // Starts to fetch the first parts of a tile's side matrix. This consumer's begins at `row`.
  __device__ void prefetch(int64_t batch, int row, int column) {
    if (!has_side() || !is_leader()) return;
    ptx::bulk_wait_read<0>();
    const int count = part_rows(row) * part_columns(column);
    for (int part = 0; part < count && part < plan_.boxes; ++part)
      fetch_side(batch, row, column, part);
  }

  // Stores the result of a tile, and what it is to be judged by. The sums are in registers, or all
  // of them in memory.
  __device__ void finish(const typename Gemm::Sums& sums, const Shares<Gemm>& shares, int64_t batch,
                         int row, int column) {
    const int rows = part_rows(row), columns = part_columns(column);
    int number = 0;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
#pragma unroll 1
      for (int j = 0; j < columns; ++j, ++number, slots_.advance()) {
        Part x;
        if (shares.count() > 1)
          shares.sum(x.at, i * kRowParts + j);
        else
          take(x, sums, i * kRowParts + j);
        finish_part(x, batch, row + i * kRows, column + j * kColumns, number);
        if (!has_side() || !is_leader()) continue;
        // The box of an earlier part is free.
        const int next = number - stores_read() + plan_.boxes;
        if (number >= stores_read() && next < rows * columns) fetch_side(batch, row, column, next);
      }
    }
    if (g_.found_inf && ptx::warp_any(!finite_) && threadIdx.x % 32 == 0)
      ptx::store_any(g_.found_inf, g_.found);
    finite_ = true;
    if (g_.column_sums) finish_column_sums(column);
    if (g_.square_sum) finish_square_sum(batch, row, column);
  }

  // Shared memory has to outlive the last store.
  __device__ void close() const {
    if (is_leader()) ptx::bulk_wait_read<0>();
  }

 private:
  static constexpr Sm90Tile kTile = Gemm::kTile;
  static constexpr int kRows = Sm90Tile::kBoxRows, kColumns = Sm90Tile::kBoxColumns;
  static constexpr int kRowParts = kTile.n / kColumns;

  __device__ static bool is_leader() { return consumer_thread() == 0; }
  __device__ bool stores_aux() const { return g_.aux.data && !g_.derivative; }
  __device__ bool has_side() const {
    return (g_.c.data && !plan_.reduce) || (g_.aux.data && g_.derivative);
  }
  __device__ int slot_boxes() const { return stores_aux() ? 2 : 1; }
  // While a part is computed, the slots of all but so many parts before it are known to be free.
  // With three of them a store has a part's time to be read.
  __device__ int stores_read() const { return slots_.size > 2 ? 2 : 1; }

  // The parts of a consumer's tile that have elements in the matrix.
  __device__ int part_columns(int column) const {
    const int64_t left = (g_.n - column + kColumns - 1) / kColumns;
    return left < kRowParts ? static_cast<int>(left) : kRowParts;
  }
  __device__ int part_rows(int row) const {
    const int64_t left = (g_.m - row + kRows - 1) / kRows;
    return left < 0 ? 0 : left < Gemm::kRowBlocks ? static_cast<int>(left) : Gemm::kRowBlocks;
  }

  __device__ unsigned char* box(int index) const { return boxes_ + index * box_bytes_; }

  __device__ void fetch_side(int64_t batch, int row, int column, int number) {
    const int columns = part_columns(column);
    ptx::Mbarrier& full = header_.side_full[consumer_][next_side_.at];
    ptx::mbarrier_arrive_expect_tx(full, box_bytes_);
    ptx::tma_load(box(next_side_.at), maps_.side, full, column + number % columns * kColumns,
                  row + number / columns * kRows, static_cast<int>(batch));
    next_side_.advance();
  }

  // Only constants can number registers: a part's are chosen by its number in the tile.
  __device__ static void take(Part& x, const typename Gemm::Sums& sums, int number) {
#pragma unroll
    for (int i = 0; i < Gemm::kRowBlocks * kRowParts; ++i)
      if (i == number)
        memcpy(x.at, &sums[i / kRowParts][i % kRowParts * Part::kSize], sizeof(x.at));
  }

  __device__ void finish_part(Part& x, int64_t batch, int row, int column, int number) {
    unsigned char* const to = box(slots_.at * slot_boxes());
    const float alpha = static_cast<float>(g_.alpha);
#pragma unroll
    for (float& value : x.at) value *= alpha;
    if (has_side()) ptx::mbarrier_wait(header_.side_full[consumer_][slots_.at], slots_.parity);
    if (has_side() && !g_.derivative) add_side(x, to);
    if (g_.bias.data) add_bias(x, batch, column);
    if (stores_aux())
      with_type(g_.out.dtype, [&](auto zero) { x.write<decltype(zero)>(to + box_bytes_); });
    if (g_.activation != Activation::none) apply_activation(x, to);
    if (g_.found_inf || g_.square_sum) judge(x, row, column);
    if (g_.column_sums) sum_columns(x, row, number);
    with_type(g_.out.dtype, [&](auto zero) { x.write<decltype(zero)>(to); });

    // By every thread that wrote: TMA reads through another proxy.
    ptx::fence_proxy_async();
    if (is_leader()) {
      if (stores_read() == 1)
        ptx::bulk_wait_read<0>();
      else
        ptx::bulk_wait_read<1>();
    }
    // All have written, and know which boxes are free.
    consumer_sync(consumer_);
    if (is_leader()) {
      const int z = static_cast<int>(batch);
      if (plan_.reduce)
        ptx::tma_reduce_add(maps_.out, to, column, row, z);
      else
        ptx::tma_store(maps_.out, to, column, row, z);
      if (stores_aux()) ptx::tma_store(maps_.side, to + box_bytes_, column, row, z);
      ptx::bulk_commit();
    }
    if (g_.column_sums) store_column_sums(batch, row, column, number);
  }

  // In a loop: the code for four numbers is long enough, and takes registers enough.
  __device__ void apply_activation(Part& x, const unsigned char* box) const {
#pragma unroll 1
    for (int i = 0; i < Part::kSize / Part::kGroup; ++i) {
      float group[Part::kGroup], aux[Part::kGroup];
      x.take_group(group);
      if (g_.derivative) {
        with_type(g_.out.dtype, [&](auto zero) { Part::read<decltype(zero)>(aux, box, i); });
        multiply_by_derivative(g_.activation, aux, group);
      } else {
        activate(g_.activation, group);
      }
      x.put_group(group);
    }
  }

  __device__ void add_side(Part& x, const unsigned char* box) const {
    const float beta = static_cast<float>(g_.beta);
    with_type(g_.out.dtype, [&](auto zero) {
#pragma unroll
      for (int i = 0; i < Part::kSize; i += Part::kGroup) {
        float c[Part::kGroup];
        Part::read<decltype(zero)>(c, box, i / Part::kGroup);
#pragma unroll
        for (int j = 0; j < Part::kGroup; ++j) x.at[i + j] += beta * c[j];
      }
    });
  }

  __device__ void add_bias(Part& x, int64_t batch, int column) const {
    with_type(g_.bias.dtype, [&](auto zero) {
      using T = decltype(zero);
      const PartPlace place;
      const T* const from = static_cast<const T*>(ptx::global(g_.bias.data)) +
                            batch * g_.bias.batch_stride + column * g_.bias.column_stride;
#pragma unroll
      for (int i = 0; i < Part::kSize; i += i % 2 ? 3 : 1) {
        if (column + place.column(i) >= g_.n) continue;
        const float bias = Element<T>::widen(from[place.column(i) * g_.bias.column_stride]);
        x.at[i] += bias;
        x.at[i + 2] += bias;
      }
    });
  }

  // Looks at what is rounded and stored.
  __device__ void judge(const Part& x, int row, int column) {
    with_type(g_.out.dtype, [&](auto zero) {
      using T = decltype(zero);
      const PartPlace place;
#pragma unroll
      for (int i = 0; i < Part::kSize; ++i) {
        if (row + place.row(i) >= g_.m || column + place.column(i) >= g_.n) continue;
        const T rounded = Element<T>::round(x.at[i]);
        finite_ &= Element<T>::finite(rounded);
        const double value = Element<T>::widen(rounded);
        if (g_.square_sum) square_sum_ += value * value;
      }
    });
  }

  // Adds up the columns of a part over this warp's rows. Always in the same order, as below.
  __device__ void sum_columns(const Part& x, int row, int number) {
    const int lane = consumer_thread() % 32, warp = consumer_thread() / 32;
    const PartPlace place;
#pragma unroll
    for (int i = 0; i < Part::kSize; i += i % 2 ? 3 : 1) {
      float sum = row + place.row(i) < g_.m ? x.at[i] : 0.0f;
      if (row + place.row(i + 2) < g_.m) sum += x.at[i + 2];
      for (int mask = 4; mask < 32; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
      if (lane < 4) header_.column_sums[consumer_][number % 2][warp][place.column(i)] = sum;
    }
  }

  // Behind the barrier: those of all rows of the part.
  __device__ void store_column_sums(int64_t batch, int row, int column, int number) const {
    const int thread = consumer_thread();
    if (thread >= kColumns) return;
    float sum = 0;
    for (int warp = 0; warp < 4; ++warp)
      sum += header_.column_sums[consumer_][number % 2][warp][thread];
    const int64_t block_row = batch * ((g_.m + kRows - 1) / kRows) + row / kRows;
    column_sums()[block_row * column_sums_width() + column + thread] = sum;
  }

  __device__ float* column_sums() const {
    return reinterpret_cast<float*>(workspace_ + plan_.column_sums_offset);
  }
  __device__ int64_t column_sums_width() const {
    return int64_t{plan_.tiles_n} * plan_.cluster_n * kTile.n;
  }
  __device__ int64_t tile_rows() const { return (g_.m + kTile.m - 1) / kTile.m; }
  __device__ int64_t tile_columns() const { return (g_.n + kTile.n - 1) / kTile.n; }

  // The last consumer of a column of tiles adds its sums up.
  __device__ void finish_column_sums(int column) {
    const auto consumers = static_cast<uint32_t>(g_.batch * tile_rows() * Gemm::kTeam);
    uint32_t* const ticket = tickets_ + plan_.column_tickets + column / kTile.n;
    if (!is_last_consumer(ticket, consumers, header_.last[consumer_], consumer_)) return;
    const int64_t rows = g_.batch * ((g_.m + kRows - 1) / kRows);
    for (int i = consumer_thread(); i < kTile.n && column + i < g_.n; i += kWarpgroup) {
      const float* const from = column_sums() + column + i;
      float sum = 0;
      for (int64_t row = 0; row < rows; ++row)
        sum += ptx::load_l2(from + row * column_sums_width());
      g_.column_sums[column + i] = sum;
    }
  }

  // The last consumer of all adds up what each warp has.
  __device__ void finish_square_sum(int64_t batch, int row, int column) {
    auto* const sums = reinterpret_cast<double*>(workspace_ + plan_.squares_offset);
    const int thread = consumer_thread(), warp = thread / 32;
    const int64_t tile = (batch * tile_rows() + row / kTile.m) * tile_columns() + column / kTile.n;
    const int member = Gemm::kTeam > 1 ? consumer_ : 0;
    const double own = warp_sum(square_sum_);
    square_sum_ = 0;
    if (thread % 32 == 0) sums[(tile * Gemm::kTeam + member) * 4 + warp] = own;
    const auto consumers =
        static_cast<uint32_t>(g_.batch * tile_rows() * tile_columns() * Gemm::kTeam);
    uint32_t* const ticket = tickets_ + plan_.square_tickets;
    if (!is_last_consumer(ticket, consumers, header_.last[consumer_], consumer_)) return;
    double sum = 0;
    for (int64_t i = thread; i < int64_t{consumers} * 4; i += kWarpgroup)
      sum += ptx::load_l2(sums + i);
    sum = warp_sum(sum);
    if (thread % 32 == 0) header_.square_sums[consumer_][warp] = sum;
    consumer_sync(consumer_);
    if (thread > 0) return;
    const double* const warps = header_.square_sums[consumer_];
    *g_.square_sum = warps[0] + warps[1] + warps[2] + warps[3];
  }

  Sm90Header& header_;
  const Sm90Maps& maps_;
  const GemmArgs& g_;
  const GemmPlan& plan_;
  const int consumer_;
  const int box_bytes_;
  unsigned char* const boxes_;
  unsigned char* const workspace_;
  uint32_t* const tickets_;
  Ring slots_;      // boxes of the result, or pairs of boxes of it and of aux
  Ring next_side_;  // boxes, the leader's
  bool finite_ = true;
  double square_sum_ = 0;
};

}  // namespace amp_ext
