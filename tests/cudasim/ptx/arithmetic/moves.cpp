// Move, select and compare registers.
#include <iterator>

#include "arithmetic/lanes.h"
#include "parser/words.h"

namespace cudasim {
namespace {

// ---- mov of a vector: rows[0] is the whole, the others its parts, of it.mode bits ---------------

void pack(Warp& w, const Instruction& it, u32 lanes) {
  each_lane(lanes, [&](int lane) {
    u64 whole = 0;
    for (int i = 0; i < it.count; ++i)
      whole |= static_cast<u64>(w.source(it.rows[1 + i])[lane]) << it.mode * i;
    if (it.mode * it.count == 64)
      put<u64>(w.destination(it.rows[0]), lane, whole);
    else
      w.destination(it.rows[0])[lane] = static_cast<u32>(whole);
  });
}

void unpack(Warp& w, const Instruction& it, u32 lanes) {
  const bool is_wide = it.mode * it.count == 64;
  const u64 mask = (u64{1} << it.mode) - 1;
  each_lane(lanes, [&](int lane) {
    const u32* const from = w.source(it.rows[0]);
    const u64 whole = is_wide ? get<u64>(from, lane) : u64{from[lane]};
    for (int i = 0; i < it.count; ++i)
      w.destination(it.rows[1 + i])[lane] = static_cast<u32>(whole >> it.mode * i & mask);
  });
}

bool decode_vector_move(Decoder& d, int bits) {
  const bool packs = d.operands[1].type == Operand::vector;
  const auto& parts = d.operands[packs ? 1 : 0].parts;
  const Operand& whole = d.operands[packs ? 0 : 1];
  const int part = bits / static_cast<int>(parts.size());
  if (bits > 64 || part < 16) d.unknown("a vector");
  d.to.mode = part;
  d.to.count = static_cast<s32>(parts.size());
  d.to.rows[0] = packs ? d.destination(whole, bits) : d.source(whole, bits);
  for (size_t i = 0; i < parts.size(); ++i)
    d.to.rows[1 + i] = packs ? d.source(parts[i], part) : d.destination(parts[i], part);
  d.to.run = packs ? pack : unpack;
  return true;
}

void move_predicate(Warp& w, const Instruction& it, u32 lanes) {
  w.set_predicate(it.predicates[0], lanes,
                  it.predicates[1] >= 0 ? w.source_predicate(it, 1) : (it.kind ? kAllLanes : 0));
}

bool decode_move(Decoder& d) {
  const std::string type = d.type();
  if (type == "pred") {
    d.set_predicate(0, d.operands.at(0));
    if (d.operands.at(1).type == Operand::integer)
      d.to.kind = d.operands[1].value != 0;
    else
      d.set_source_predicate(1, d.operands[1]);
    d.to.run = move_predicate;
    return true;
  }
  const int bits = bits_of(type);
  for (const Operand& operand : d.operands)
    if (operand.type == Operand::vector) return decode_vector_move(d, bits);
  if (bits == 64) return d.lanes<u64, u64>([](u64 a) { return a; });
  if (bits == 32) return d.lanes<u32, u32>([](u32 a) { return a; });
  if (bits == 16) return d.lanes<u16, u16>([](u16 a) { return a; });
  d.unknown("a width");
}

// ---- selections ---------------------------------------------------------------------------------

template <class T>
void select(Warp& w, const Instruction& it, u32 lanes) {
  u32* const to = w.destination(it.rows[0]);
  const u32 *const a = w.source(it.rows[1]), *const b = w.source(it.rows[2]);
  const u32 p = w.source_predicate(it, 0);
  each_lane(lanes, [&](int i) { put<T>(to, i, p >> i & 1 ? get<T>(a, i) : get<T>(b, i)); });
}

// ---- comparisons --------------------------------------------------------------------------------

enum Comparison { eq, ne, lt, le, gt, ge, equ, neu, ltu, leu, gtu, geu, ordered, unordered };

template <int kComparison, class T>
inline bool compare(T a, T b) {
  const bool has_nan = a != a || b != b;
  switch (kComparison) {
    case eq: return a == b;
    case ne: return !has_nan && a != b;
    case lt: return a < b;
    case le: return a <= b;
    case gt: return a > b;
    case ge: return a >= b;
    case equ: return has_nan || a == b;
    case neu: return a != b;
    case ltu: return !(a >= b);
    case leu: return !(a > b);
    case gtu: return !(a <= b);
    case geu: return !(a < b);
    case ordered: return !has_nan;
    default: return has_nan;
  }
}

template <int kComparison, class T>
void set_predicate(Warp& w, const Instruction& it, u32 lanes) {
  const u32 *const a = w.source(it.rows[0]), *const b = w.source(it.rows[1]);
  u32 bits = 0;
  for (int i = 0; i < kLanes; ++i) {
    bool holds;
    if constexpr (is_half<T>)
      holds = compare<kComparison>(widen(get<T>(a, i)), widen(get<T>(b, i)));
    else if constexpr (std::is_same_v<T, float>)
      holds = it.flags ? compare<kComparison>(flush(get<T>(a, i)), flush(get<T>(b, i)))
                       : compare<kComparison>(get<T>(a, i), get<T>(b, i));
    else
      holds = compare<kComparison>(get<T>(a, i), get<T>(b, i));
    bits |= static_cast<u32>(holds) << i;
  }
  w.set_predicate(it.predicates[0], lanes, bits);
}

template <class T, size_t... I>
Run comparison(int which, std::index_sequence<I...>) {
  static constexpr Run runs[] = {set_predicate<I, T>...};
  return runs[which];
}

bool decode_comparison(Decoder& d) {
  static const std::pair<const char*, Comparison> names[] = {
      {"eq", eq},   {"ne", ne},   {"lt", lt},   {"le", le},   {"gt", gt},       {"ge", ge},
      {"lo", lt},   {"ls", le},   {"hi", gt},   {"hs", ge},   {"equ", equ},     {"neu", neu},
      {"ltu", ltu}, {"leu", leu}, {"gtu", gtu}, {"geu", geu}, {"num", ordered}, {"nan", unordered}};
  int which = -1;
  for (const auto& [name, comparison] : names)
    if (d.words.at(1) == name) which = comparison;
  if (which < 0) d.unknown("a comparison");
  if (d.operands.size() != 3) d.unknown("a combination");
  d.set_predicate(0, d.operands[0]);
  d.to.flags = d.has("ftz");
  const std::string type = d.type();
  const int bits = bits_of(type);
  d.to.rows[0] = d.source(d.operands[1], bits);
  d.to.rows[1] = d.source(d.operands[2], bits);
  const auto pick = [&]<class T>() {
    d.to.run = comparison<T>(which, std::make_index_sequence<14>());
  };
  return with_type(Integers(), type, pick) || with_type(Floats(), type, pick) ||
         with_type(Types<f16, bf16>(), type, pick);
}

}  // namespace

bool decode_moves(Decoder& d) {
  if (d.name() == "mov") return decode_move(d);
  if (d.name() == "setp") return decode_comparison(d);
  if (d.name() != "selp") return false;
  const int bits = bits_of(d.type());
  d.to.rows[0] = d.destination(d.operands.at(0), bits);
  d.to.rows[1] = d.source(d.operands.at(1), bits);
  d.to.rows[2] = d.source(d.operands.at(2), bits);
  d.set_source_predicate(0, d.operands.at(3));
  d.to.run = bits == 64 ? select<u64> : bits == 32 ? select<u32> : select<u16>;
  return true;
}

}  // namespace cudasim
