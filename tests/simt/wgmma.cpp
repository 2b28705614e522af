// wgmma: started by a warpgroup together, executed by each warp for its own rows when it waits.
#include "wgmma.h"

#include <algorithm>
#include <ptx_wgmma.cuh>

#include "elements.h"
#include "engine.h"

namespace simt {
namespace {

constexpr int kGroupRows = 64;
constexpr int kDepth = 16;
constexpr int kMostColumns = 256;
constexpr int kChunk = 8;  // elements, 16 bytes
constexpr uint32_t kNan = 0xffffffff;

// ---- operands in shared memory -----------------------------------------------------------------

struct Operand {
  const char* name;
  uint32_t start, leading, stride;  // bytes
  bool is_mn_major;
};

Operand decode(const char* name, uint64_t descriptor, bool is_mn_major) {
  constexpr uint64_t kFields = 0x4000'3fff'3fff'3fff, kSwizzle128 = 1ull << 62;
  constexpr uint32_t kRowOfAtom = 0x380;
  if ((descriptor & ~kFields) != 0 || !(descriptor & kSwizzle128))
    fail("%s: descriptor 0x%lx is not one of a swizzle of 128 bytes", name, descriptor);
  const auto bytes = [&](int bit) {
    return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4;
  };
  const Operand operand{name, bytes(0), bytes(16), bytes(32), is_mn_major};
  if (operand.start & kRowOfAtom)
    fail("%s: shared+%u does not begin in the first row of an atom of 1024 bytes", name,
         operand.start - kSharedWindow);
  return operand;
}

// Eight contiguous elements of an operand, from this index of m or n, and of k, on.
const uint16_t* chunk_at(const Block& block, const Operand& operand, int i, int k) {
  const uint32_t place = operand.is_mn_major ? i / 64 * operand.leading + i % 64 * 2 +
                                                   k / 8 * operand.stride + k % 8 * 128
                                             : i / 8 * operand.stride + i % 8 * 128 + k * 2;
  const uint32_t address = operand.start + place;
  const uint32_t offset = (address ^ (address >> 3 & 0x70)) - kSharedWindow;
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
  each_chunk(block, decode("wgmma a", operation.a, operation.a_is_mn_major), 0, kGroupRows,
             nothing);
  each_chunk(block, decode("wgmma b", operation.b, operation.b_is_mn_major), 0, operation.columns,
             nothing);
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

// ---- accumulators ------------------------------------------------------------------------------

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

// ---- execution ---------------------------------------------------------------------------------

template <Element kType>
void execute(const Block& block, int first_row, const Wgmma& operation, std::vector<float>& d) {
  static float a[kDepth][kWarpRows], b[kDepth][kMostColumns];
  const int columns = operation.columns;
  read<kType>(block, decode("wgmma a", operation.a, operation.a_is_mn_major), first_row, kWarpRows,
              a);
  read<kType>(block, decode("wgmma b", operation.b, operation.b_is_mn_major), 0, columns, b);
  if (!operation.accumulate) std::ranges::fill(d, 0.0f);
  for (int row = 0; row < kWarpRows; ++row) {
    float* const sums = d.data() + row * columns;
    for (int k = 0; k < kDepth; ++k)
      for (int column = 0; column < columns; ++column) sums[column] += a[k][row] * b[k][column];
  }
}

void execute(const Warp& warp, const WarpMatrices::Started& started) {
  const Thread& first = *warp.lanes[0];
  const int first_row = first.number % kWarpgroupThreads / kWarpThreads * kWarpRows;
  const bool half = started.operation.type == Element::half;
  (half ? execute<Element::half> : execute<Element::bfloat16>)(*first.block, first_row,
                                                               started.operation,
                                                               started.accumulator->values);
}

struct Registers {
  Warp& warp;
  float* d;
};

// Puts the part of the warp with these lanes under way.
void start(const Wgmma& operation, Registers* const* registers) {
  std::vector<float*> lanes;
  for (int i = 0; i < kWarpThreads; ++i) lanes.push_back(registers[i]->d);
  WarpMatrices& matrices = registers[0]->warp.matrices;
  Accumulator& accumulator = take(matrices, std::move(lanes), operation.columns);
  ++accumulator.in_flight;
  matrices.open.push_back({operation, &accumulator});
}

void retire(Warp& warp) {
  WarpMatrices& matrices = warp.matrices;
  for (const WarpMatrices::Started& started : matrices.groups.front()) {
    execute(warp, started);
    if (--started.accumulator->in_flight == 0) give_back(matrices, *started.accumulator);
  }
  matrices.groups.pop_front();
}

// A collective of the warp that changes the state of its wgmmas.
template <class Change>
void change(const Operation& operation, Change change) {
  whole_warpgroup(operation.name);
  Warp& warp = *current->warp;
  int nothing;
  warp.meeting.meet(operation, current->lane, &nothing, false, [&](int* const*) { change(warp); });
}

}  // namespace

void wgmma_fence() {
  change({"wgmma_fence"}, [](Warp& warp) { warp.matrices.fenced = true; });
}

void wgmma(const Wgmma& operation, float* d) {
  Warpgroup& group = whole_warpgroup("wgmma");
  if (!current->warp->matrices.fenced)
    fail("missing wgmma.fence: none since the start or the last wgmma_wait");
  const uint64_t shape = operation.columns | static_cast<uint64_t>(operation.type) << 9 |
                         operation.a_is_mn_major << 10 | operation.b_is_mn_major << 11;
  const Operation all{"wgmma", {operation.a, operation.b, operation.accumulate, shape}};
  Registers mine{*current->warp, d};
  group.meeting.meet(all, current->number % kWarpgroupThreads, &mine, false,
                     [&](Registers* const* threads) {
                       check_operands(*current->block, operation);
                       for (int i = 0; i < kWarpgroupThreads; i += kWarpThreads)
                         start(operation, threads + i);
                     });
}

void wgmma_wait(int pending) {
  const auto last = static_cast<size_t>(pending);
  change({"wgmma_wait", {last}}, [&](Warp& warp) {
    while (warp.matrices.groups.size() > last) retire(warp);
    warp.matrices.fenced = false;
  });
}

void check_wgmmas_at_exit(const Warp& warp) {
  if (!warp.matrices.accumulators.empty()) fail("exit with wgmmas in flight: no wait follows");
}

}  // namespace simt

void amp_ext::ptx::wgmma_commit() {
  simt::change({"wgmma_commit"}, [](simt::Warp& warp) {
    warp.matrices.groups.push_back(std::exchange(warp.matrices.open, {}));
  });
}
