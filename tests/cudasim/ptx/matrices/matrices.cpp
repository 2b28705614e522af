// Load and store matrices of 8 x 8, and multiply fragments that lanes hold: mma.sync.
#include "memory/memory.h"

namespace cudasim {
namespace {

// ---- ldmatrix and stmatrix ----------------------------------------------------------------------

// Lane 8 i + r has the address of row r of matrix i. Lane l has elements 2 (l % 4) and the next of
// row l / 4 of each matrix, or of column l / 4 if transposed.
using Matrices = u16[4][8][8];

u16& element(Matrices& matrices, bool transposed, int i, int lane, int which) {
  const int row = lane / 4, column = lane % 4 * 2 + which;
  return transposed ? matrices[i][column][row] : matrices[i][row][column];
}

// Returns the lanes that have elements of a row.
u32 lanes_of(int row, bool transposed) {
  return transposed ? 0x11111111u << row / 2 : 0xfu << 4 * row;
}

// Pipelines load fragments ahead, behind the last step too. Bytes without a write are NaN: their
// uses show. it.count: matrices; it.kind: transposed
void ldmatrix(Warp& w, const Instruction& it, u32) {
  Matrices matrices;
  Accesses accesses(w, it, role_of(w, false));
  for (int lane = 0; lane < 8 * it.count; ++lane) {
    const u32 address = static_cast<u32>(address_of(w, it, it.rows[0], lane));
    const u8* const from = shared_bytes(*w.block, address, 16, 16, lane);
    accesses.shared(address, 16, lane, lanes_of(lane % 8, it.kind));
    memcpy(matrices[lane / 8][lane % 8], from, 16);
  }
  accesses.finish();
  for (int i = 0; i < it.count; ++i)
    for (int lane = 0; lane < kLanes; ++lane)
      w.destination(it.rows[1 + i])[lane] = static_cast<u32>(element(matrices, it.kind, i, lane, 1))
                                                << 16 |
                                            element(matrices, it.kind, i, lane, 0);
}

void stmatrix(Warp& w, const Instruction& it, u32) {
  Matrices matrices;
  for (int i = 0; i < it.count; ++i)
    for (int lane = 0; lane < kLanes; ++lane) {
      const u32 value = w.source(it.rows[1 + i])[lane];
      element(matrices, it.kind, i, lane, 0) = static_cast<u16>(value);
      element(matrices, it.kind, i, lane, 1) = static_cast<u16>(value >> 16);
    }
  Accesses accesses(w, it, role_of(w, true));
  for (int lane = 0; lane < 8 * it.count; ++lane) {
    const u32 address = static_cast<u32>(address_of(w, it, it.rows[0], lane));
    u8* const to = shared_bytes(*w.block, address, 16, 16, lane);
    note_generic_write(w, lane, address, 16);
    accesses.shared(address, 16, lane, lanes_of(lane % 8, it.kind));
    memcpy(to, matrices[lane / 8][lane % 8], 16);
  }
  accesses.finish();
}

bool decode_matrix_access(Decoder& d) {
  const bool loads = d.name() == "ldmatrix";
  if (!d.has("m8n8") || !d.has("b16") || !d.has("sync") || !d.has("aligned")) d.unknown();
  d.to.flow = Flow::aligned;
  d.to.count = d.has("x1") ? 1 : d.has("x2") ? 2 : 4;
  d.to.kind = d.has("trans");
  d.to.rows[0] = d.base(loads ? 1 : 0, 32);
  const Operand& value = d.operands.at(loads ? 0 : 1);
  if (static_cast<int>(value.parts.size()) != d.to.count) d.unknown("another number of registers");
  for (int i = 0; i < d.to.count; ++i) {
    const Operand& part = value.parts[static_cast<size_t>(i)];
    d.to.rows[1 + i] = loads ? d.destination(part, 32) : d.source(part, 32);
  }
  return d.runs(loads ? ldmatrix : stmatrix);
}

// ---- mma.sync -----------------------------------------------------------------------------------

float half_of(u32 pair, int which, bool is_bf16) {
  const u16 bits = static_cast<u16>(which ? pair >> 16 : pair);
  return is_bf16 ? widen(bf16{bits}) : widen(f16{bits});
}

// D = A B + C of 16 x 8, with 16 columns of A. rows[0...]: D, more: A, B, C. Register i of A has
// row lane / 4 + 8 (i % 2), columns 2 (lane % 4) + 8 (i / 2) and the next. Register i of B has
// column lane / 4 and these columns as rows. C and D have columns 2 (lane % 4), of row lane / 4 + 8
// (i / 2).
void mma(Warp& w, const Instruction& it, u32) {
  float a[16][16], b[16][8], sums[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const int first = lane / 4, pair = lane % 4 * 2;
    const auto half = [&](int i) {
      return half_of(w.source(it.more[static_cast<size_t>(i / 2)])[lane], i % 2, it.kind);
    };
    for (int i = 0; i < 8; ++i) a[first + 8 * (i / 2 % 2)][pair + i % 2 + 8 * (i / 4)] = half(i);
    for (int i = 0; i < 4; ++i) b[pair + i % 2 + 8 * (i / 2)][first] = half(8 + i);
    for (int i = 0; i < 4; ++i)
      sums[first + 8 * (i / 2)][pair + i % 2] =
          w.source<float>(it.more[static_cast<size_t>(6 + i)])[lane];
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < 8; ++n) sums[m][n] = std::fma(a[m][k], b[k][n], sums[m][n]);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i)
      w.destination<float>(it.rows[i])[lane] =
          canonical(sums[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2]);
}

bool decode_mma(Decoder& d) {
  d.to.kind = d.type(1) == "bf16";
  const std::string half = d.to.kind ? ".bf16" : ".f16";
  const std::string form = "mma.sync.aligned.m16n8k16.row.col.f32" + half + half + ".f32";
  if (d.statement.find(form + " ") == std::string::npos) d.unknown("a shape or a type");
  d.to.flow = Flow::aligned;
  const size_t sizes[] = {4, 4, 2, 4};
  for (size_t i = 0; i < 4; ++i) {
    const auto& parts = d.operands.at(i).parts;
    if (parts.size() != sizes[i]) d.unknown("another number of registers");
    for (size_t j = 0; j < parts.size(); ++j)
      if (i == 0)
        d.to.rows[j] = d.destination(parts[j], 32);
      else
        d.to.more.push_back(d.source(parts[j], 32));
  }
  return d.runs(mma);
}

}  // namespace

bool decode_matrix(Decoder& d) {
  if (d.name() == "ldmatrix" || d.name() == "stmatrix") return decode_matrix_access(d);
  if (d.name() == "mma") return decode_mma(d);
  return false;
}

}  // namespace cudasim
