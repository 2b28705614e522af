// Matrices in the registers of a warp: ldmatrix, stmatrix, mma and wgmma. Wgmmas are started by a
// warpgroup together, and executed by each warp for its own rows when it waits.
#include <algorithm>
#include <bit>
#include <cstring>
#include <ptx/wgmma.cuh>

#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

// ---- 16-bit elements as numbers, without branches: loops over them become vector code ----------

template <Element kType>
float to_float(uint16_t bits) {
  if constexpr (kType == Element::bfloat16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;  // the biases' difference
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t number = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : finite;
  return std::bit_cast<float>(number | (bits & 0x8000u) << 16);
}

// ---- ldmatrix and stmatrix ---------------------------------------------------------------------

constexpr int kRows = 8;  // of a matrix of 16-bit elements, 16 bytes each
constexpr int kRowBytes = 16;

struct Fragment {
  uint16_t* row;        // in shared memory, of one matrix
  uint16_t* registers;  // two elements of each matrix
};

// Moves the elements of all matrices between rows and registers.
void move_all(Fragment* const* lanes, const MatrixMove& move) {
  for (int matrix = 0; matrix < move.matrices; ++matrix) {
    for (int i = 0; i < 2 * kWarpThreads; ++i) {
      const int lane = i / 2, half = i % 2;
      const int major = lane / 4, minor = lane % 4 * 2 + half;
      const int row = move.transpose ? minor : major, column = move.transpose ? major : minor;
      uint16_t* const shared = lanes[matrix * kRows + row]->row + column;
      uint16_t* const own = lanes[lane]->registers + 2 * matrix + half;
      memcpy(move.store ? shared : own, move.store ? own : shared, sizeof(uint16_t));
    }
  }
}

// ---- mma ---------------------------------------------------------------------------------------

struct Mma {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

template <Element kType>
void multiply(Mma* const* lanes) {
  constexpr int kM = 16, kN = 8, kK = 16;
  float a[kM][kK], b[kK][kN], d[kM][kN];
  const auto element = [](const uint32_t* registers, int i, int half) {
    return to_float<kType>(static_cast<uint16_t>(registers[i] >> 16 * half));
  };
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    const Mma& mine = *lanes[lane];
    const int g = lane / 4, t = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i)
        a[g + 8 * (i % 2)][t + 8 * (i / 2) + half] = element(mine.a, i, half);
      for (int i = 0; i < 2; ++i) b[t + 8 * i + half][g] = element(mine.b, i, half);
    }
    for (int i = 0; i < 4; ++i) d[g + 8 * (i / 2)][t + i % 2] = mine.d[i];
  }
  for (int row = 0; row < kM; ++row)
    for (int k = 0; k < kK; ++k)
      for (int column = 0; column < kN; ++column) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < kWarpThreads; ++lane)
    for (int i = 0; i < 4; ++i) lanes[lane]->d[i] = d[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
}

// ---- wgmma: its operands in shared memory ------------------------------------------------------

constexpr int kGroupRows = 64;
constexpr int kDepth = 16;
constexpr int kMostColumns = 256;
constexpr int kChunk = 8;  // elements, 16 bytes
constexpr uint32_t kNan = 0xffffffff;

struct Operand {
  const char* name;
  uint32_t start, leading, stride, row;  // bytes; a row is one of an atom
  bool is_mn_major;
};

Operand decode(const char* name, uint64_t descriptor, bool is_mn_major) {
  constexpr uint64_t kFields = 0xc000'3fff'3fff'3fff;
  const uint64_t swizzle = descriptor >> 62;
  if ((descriptor & ~kFields) != 0 || (swizzle != 1 && swizzle != 2))
    fail("%s: descriptor 0x%lx is not one of a swizzle of 128 or 64 bytes", name, descriptor);
  const auto bytes = [&](int bit) { return uint32_t(descriptor >> bit & 0x3fff) << 4; };
  const Operand operand{name, bytes(0), bytes(16), bytes(32), 256u >> swizzle, is_mn_major};
  if (operand.start % (8 * operand.row) >= 128)
    fail("%s: shared+%u does not begin in the first row of an atom of %u bytes", name,
         operand.start - kSharedWindow, 8 * operand.row);
  if (!is_mn_major && operand.leading != 16)  // unused, and assumed by the hardware
    fail("%s: a leading offset of %u bytes where k is contiguous, not 16", name, operand.leading);
  return operand;
}

Operand operand_a(const Wgmma& operation) {
  return decode("wgmma a", operation.a, operation.a_is_mn_major);
}

Operand operand_b(const Wgmma& operation) {
  return decode("wgmma b", operation.b, operation.b_is_mn_major);
}

// Eight contiguous elements of an operand, from this index of m or n, and of k, on.
const uint16_t* chunk_at(const Block& block, const Operand& operand, int i, int k) {
  const int row = static_cast<int>(operand.row), in_row = row / 2;
  const uint32_t place = operand.is_mn_major ? i / in_row * operand.leading + i % in_row * 2 +
                                                   k / 8 * operand.stride + k % 8 * row
                                             : i / 8 * operand.stride + i % 8 * row + k * 2;
  const uint32_t address = operand.start + place;
  const uint32_t offset = (address ^ (address >> 3 & (row - 16))) - kSharedWindow;
  if (address < kSharedWindow || offset + 2 * kChunk > block.shared_bytes)
    fail("%s: shared overrun: reads shared+%d of %zu", operand.name, static_cast<int>(offset),
         block.shared_bytes);
  check_marks(operand.name, block, offset, 2 * kChunk);
  return reinterpret_cast<const uint16_t*>(block.shared + offset);
}

// Calls visit(index of m or n, index of k, chunk) for each chunk of a slice along m or n.
template <class Visit>
void each_chunk(const Block& block, const Operand& operand, int first, int end, Visit visit) {
  const int step = operand.is_mn_major ? kChunk : 1, step_k = operand.is_mn_major ? 1 : kChunk;
  for (int i = first; i < end; i += step)
    for (int k = 0; k < kDepth; k += step_k) visit(i, k, chunk_at(block, operand, i, k));
}

void check_operands(const Block& block, const Wgmma& operation) {
  const auto nothing = [](int, int, const uint16_t*) {};
  each_chunk(block, operand_a(operation), 0, kGroupRows, nothing);
  each_chunk(block, operand_b(operation), 0, operation.columns, nothing);
}

// Element (i, k) of the slice becomes to[k][i].
template <Element kType, int kWidth>
void read(const Block& block, const Operand& operand, int first, int count,
          float (&to)[kDepth][kWidth]) {
  each_chunk(block, operand, first, first + count, [&](int i, int k, const uint16_t* chunk) {
    float* const at = &to[k][i - first];
    const int step = operand.is_mn_major ? 1 : kWidth;
    for (int e = 0; e < kChunk; ++e) at[e * step] = to_float<kType>(chunk[e]);
  });
}

// ---- wgmma: accumulators ------------------------------------------------------------------------

// Calls visit(register of the lane, value) for each value of the accumulator.
template <class Visit>
void each_value(Accumulator& accumulator, Visit visit) {
  const int columns = accumulator.columns;
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    for (int i = 0; i < columns / 2; ++i) {
      const int row = lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
      visit(accumulator.lanes[lane][i], accumulator.values[row * columns + column]);
    }
  }
}

void check_untouched(Accumulator& accumulator) {
  each_value(accumulator, [](const float& seen, float) {
    if (std::bit_cast<uint32_t>(seen) != kNan)
      fail("wgmma: an accumulator was changed while it was in flight");
  });
}

Accumulator& take(WarpMatrices& matrices, std::vector<float*> lanes, int columns) {
  for (Accumulator& taken : matrices.accumulators) {
    if (taken.lanes[0] != lanes[0]) continue;
    if (taken.lanes != lanes || taken.columns != columns)
      fail("wgmma: the lanes' accumulators are not those in flight");
    check_untouched(taken);
    return taken;
  }
  Accumulator& taken = matrices.accumulators.emplace_back(std::move(lanes), columns);
  taken.values.resize(kWarpRows * columns);
  each_value(taken, [](float& seen, float& value) {
    value = seen;
    seen = std::bit_cast<float>(kNan);
  });
  return taken;
}

void give_back(WarpMatrices& matrices, Accumulator& accumulator) {
  check_untouched(accumulator);
  each_value(accumulator, [](float& seen, float value) { seen = value; });
  matrices.accumulators.remove_if([&](const Accumulator& a) { return &a == &accumulator; });
}

// ---- wgmma: execution ---------------------------------------------------------------------------

template <Element kType>
void execute(const Warp& warp, const WarpMatrices::Started& started) {
  static float a[kDepth][kWarpRows], b[kDepth][kMostColumns];
  const Block& block = *warp.lanes[0]->block;
  const int first_row = warp.lanes[0]->number % kWarpgroupThreads / kWarpThreads * kWarpRows;
  const int columns = started.operation.columns;
  std::vector<float>& d = started.accumulator->values;
  read<kType>(block, operand_a(started.operation), first_row, kWarpRows, a);
  read<kType>(block, operand_b(started.operation), 0, columns, b);
  if (!started.operation.accumulate) std::ranges::fill(d, 0.0f);
  for (int row = 0; row < kWarpRows; ++row) {
    float* const sums = d.data() + row * columns;
    for (int k = 0; k < kDepth; ++k)
      for (int column = 0; column < columns; ++column) sums[column] += a[k][row] * b[k][column];
  }
}

// Puts a warp's part under way.
void start(const Wgmma& operation, WarpMatrices& matrices, float* const* registers) {
  std::vector<float*> lanes(registers, registers + kWarpThreads);
  Accumulator& accumulator = take(matrices, std::move(lanes), operation.columns);
  ++accumulator.in_flight;
  matrices.groups.back().push_back({operation, &accumulator});
}

void retire(Warp& warp) {
  WarpMatrices& matrices = warp.matrices;
  for (const WarpMatrices::Started& started : matrices.groups.front()) {
    const bool half = started.operation.type == Element::half;
    (half ? execute<Element::half> : execute<Element::bfloat16>)(warp, started);
    if (--started.accumulator->in_flight == 0) give_back(matrices, *started.accumulator);
  }
  matrices.groups.pop_front();
}

// A collective of the warp that changes the state of its wgmmas.
template <class Change>
void change(const char* operation, uint64_t operand, Change change) {
  whole_warpgroup(operation);
  Warp& warp = *current->warp;
  warp.meeting.meet({operation, {operand}}, current->lane, &warp, [&](Warp* const*) {
    const tsan::Quiet quiet;
    change(warp);
  });
}

}  // namespace

void move_matrices(const MatrixMove& move, void* row, uint32_t* registers) {
  const char* const operation = move.store ? "stmatrix" : "ldmatrix";
  Warp& warp = whole_warp(operation);
  if (current->lane < move.matrices * kRows) {
    shared_offset(operation, row, kRowBytes, kRowBytes);
    move.store ? tsan::writes(row, kRowBytes) : tsan::reads(row, kRowBytes);
  }
  Fragment mine{static_cast<uint16_t*>(row), reinterpret_cast<uint16_t*>(registers)};
  warp.meeting.meet({operation, {static_cast<uint64_t>(move.matrices), move.transpose}},
                    current->lane, &mine, [&](Fragment* const* lanes) { move_all(lanes, move); });
  if (move.store) wrote_shared(row, kRowBytes);
}

void mma(Element type, float* d, const uint32_t* a, const uint32_t* b) {
  Warp& warp = whole_warp("mma");
  const bool half = type == Element::half;
  Mma mine{d, a, b};
  warp.meeting.meet({half ? "mma.f16" : "mma.bf16"}, current->lane, &mine,
                    half ? multiply<Element::half> : multiply<Element::bfloat16>);
}

void wgmma_fence() {
  change("wgmma_fence", 0, [](Warp& warp) { warp.matrices.fenced = true; });
}

void wgmma(const Wgmma& operation, float* d) {
  Warpgroup& group = whole_warpgroup("wgmma");
  if (!current->warp->matrices.fenced)
    fail("missing wgmma.fence: none since the start or the last wgmma_wait");
  const uint64_t shape = operation.columns | static_cast<uint64_t>(operation.type) << 9 |
                         operation.a_is_mn_major << 10 | operation.b_is_mn_major << 11;
  const Operation all{"wgmma", {operation.a, operation.b, operation.accumulate, shape}};
  const int place = current->number % kWarpgroupThreads;
  group.meeting.meet(all, place, d, [&](float* const* registers) {
    const tsan::Quiet quiet;
    Block& block = *current->block;
    check_operands(block, operation);
    const int first_warp = (current->number - place) / kWarpThreads;
    for (int i = 0; i < kWarpgroupThreads / kWarpThreads; ++i)
      start(operation, block.warps[first_warp + i].matrices, registers + i * kWarpThreads);
  });
}

void wgmma_wait(int pending) {
  const auto last = static_cast<size_t>(pending);
  change("wgmma_wait", last, [&](Warp& warp) {
    while (warp.matrices.groups.size() > last + 1) retire(warp);
    warp.matrices.fenced = false;
  });
}

void check_wgmmas_at_exit(const Warp& warp) {
  if (!warp.matrices.accumulators.empty()) fail("exit with wgmmas in flight: no wait follows");
}

}  // namespace simt

void amp_ext::ptx::wgmma_commit() {
  simt::change("wgmma_commit", 0, [](simt::Warp& warp) { warp.matrices.groups.emplace_back(); });
}
