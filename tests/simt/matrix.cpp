// Matrix fragments in the registers of a warp: ldmatrix, stmatrix and mma.
#include <cstring>

#include "elements.h"
#include "engine.h"
#include "sanitizers.h"

namespace simt {
namespace {

constexpr int kRows = 8;  // of a matrix of 16-bit elements, 16 bytes each
constexpr int kRowBytes = 16;

struct Fragment {
  Thread* thread;
  unsigned char* row;
  uint32_t* registers;
};

// Element `half` of register `matrix` of this lane, where it is in shared memory.
unsigned char* element_at(Fragment* const* lanes, int lane, int matrix, int half, bool transpose) {
  const int major = lane / 4, minor = lane % 4 * 2 + half;
  const int row = transpose ? minor : major, column = transpose ? major : minor;
  return lanes[matrix * kRows + row]->row + column * sizeof(uint16_t);
}

template <class Move>
void each_element(int matrices, Move move) {
  for (int matrix = 0; matrix < matrices; ++matrix)
    for (int lane = 0; lane < kWarpThreads; ++lane)
      for (int half = 0; half < 2; ++half) move(matrix, lane, half);
}

unsigned char* half_of(uint32_t* registers, int i, int half) {
  return reinterpret_cast<unsigned char*>(registers + i) + half * sizeof(uint16_t);
}

Operation of(const char* name, int matrices, bool transpose) {
  return {name, {static_cast<uint64_t>(matrices), transpose}};
}

}  // namespace

void ldmatrix(uint32_t* to, int matrices, bool transpose, const void* row) {
  Warp& warp = whole_warp("ldmatrix");
  auto* const at = static_cast<unsigned char*>(const_cast<void*>(row));
  if (current->lane < matrices * kRows) {
    shared_offset("ldmatrix", row, kRowBytes, kRowBytes);
    tsan::reads(row, kRowBytes);
  }
  Fragment mine{current, at, to};
  const Operation operation = of(transpose ? "ldmatrix.trans" : "ldmatrix", matrices, transpose);
  warp.meeting.meet(operation, current->lane, &mine, false, [&](Fragment* const* lanes) {
    each_element(matrices, [&](int matrix, int lane, int half) {
      memcpy(half_of(lanes[lane]->registers, matrix, half),
             element_at(lanes, lane, matrix, half, transpose), sizeof(uint16_t));
    });
  });
}

void stmatrix(void* row, bool transpose, const uint32_t* from) {
  constexpr int kMatrices = 4;
  Warp& warp = whole_warp("stmatrix");
  shared_offset("stmatrix", row, kRowBytes, kRowBytes);
  Fragment mine{current, static_cast<unsigned char*>(row), const_cast<uint32_t*>(from)};
  const Operation operation = of(transpose ? "stmatrix.trans" : "stmatrix", kMatrices, transpose);
  warp.meeting.meet(operation, current->lane, &mine, false, [&](Fragment* const* lanes) {
    each_element(kMatrices, [&](int matrix, int lane, int half) {
      memcpy(element_at(lanes, lane, matrix, half, transpose),
             half_of(lanes[lane]->registers, matrix, half), sizeof(uint16_t));
    });
  });
  wrote_shared(row, kRowBytes);
}

namespace {

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

}  // namespace

void mma(Element type, float* d, const uint32_t* a, const uint32_t* b) {
  Warp& warp = whole_warp("mma");
  const bool half = type == Element::half;
  Mma mine{d, a, b};
  warp.meeting.meet({half ? "mma.f16" : "mma.bf16"}, current->lane, &mine, false,
                    half ? multiply<Element::half> : multiply<Element::bfloat16>);
}

}  // namespace simt
