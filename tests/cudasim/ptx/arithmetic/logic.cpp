// Shift, count and combine bits; move, select and compare registers.
#include <map>

#include "arithmetic/lanes.h"
#include "parser/words.h"

namespace cudasim {
namespace {

template <class F>
void combine_predicates(Warp& w, const Instruction& it, u32 lanes) {
  w.set_predicate(it.predicates[0], lanes,
                  F{}(w.source_predicate(it, 1), w.source_predicate(it, 2)));
}

template <class F>
bool decode_bitwise(Decoder& d, F f) {
  if (d.type() != "pred") return same_type<2>(d, Integers(), f);
  d.set_predicate(0, 0);
  d.set_source_predicate(1, 1);
  d.set_source_predicate(2, 2);
  return d.runs(combine_predicates<F>);
}

struct Insert {
  template <class T>
  T operator()(T a, T b, u32 position, u32 length) const {
    position &= 255, length &= 255;
    if (position >= 8 * sizeof(T) || length == 0) return b;
    const T mask = static_cast<T>((length >= 64 ? ~u64{0} : (u64{1} << length) - 1) << position);
    return static_cast<T>((b & ~mask) | (static_cast<T>(a << position) & mask));
  }
};

u32 permuted(u32 a, u32 b, u32 selectors) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 selector = selectors >> 4 * i;
    u32 byte = static_cast<u32>(bytes >> 8 * (selector & 7)) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

bool decode_shift(Decoder& d) {
  if (d.name() == "shl")
    return with_type(Integers(), d.type(), [&]<class T>() {
      d.lanes<T, T, u32>(
          [](T a, u32 n) { return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n); });
    });
  if (d.name() == "shr")
    return with_type(Integers(), d.type(), [&]<class T>() {
      d.lanes<T, T, u32>([](T a, u32 n) {
        if (n >= 8 * sizeof(T)) return a < T{0} ? static_cast<T>(-1) : T{0};
        return static_cast<T>(a >> n);
      });
    });
  if (d.name() != "shf") return false;
  if (!d.has("wrap")) d.unknown("a clamp");
  const auto pair = [](u32 a, u32 b) { return static_cast<u64>(b) << 32 | a; };
  using Pair = decltype(pair);
  if (d.has("l"))
    return d.lanes<u32, u32, u32, u32>(
        [](u32 a, u32 b, u32 n) { return static_cast<u32>(Pair{}(a, b) << (n & 31) >> 32); });
  return d.lanes<u32, u32, u32, u32>(
      [](u32 a, u32 b, u32 n) { return static_cast<u32>(Pair{}(a, b) >> (n & 31)); });
}

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
  return d.runs(packs ? pack : unpack);
}

void move_predicate(Warp& w, const Instruction& it, u32 lanes) {
  w.set_predicate(it.predicates[0], lanes,
                  it.predicates[1] >= 0 ? w.source_predicate(it, 1) : (it.kind ? kAllLanes : 0));
}

bool decode_predicate_move(Decoder& d) {
  d.set_predicate(0, 0);
  if (d.operands.at(1).type == Operand::integer)
    d.to.kind = d.operands[1].value != 0;
  else
    d.set_source_predicate(1, 1);
  if (d.name() == "not") d.to.negated ^= 2;
  return d.runs(move_predicate);
}

bool decode_move(Decoder& d) {
  const std::string type = d.type();
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

// it.kind: the relations for which a comparison holds.
enum Relation { less = 1, equal = 2, greater = 4, unordered = 8 };

template <class T>
void compare(Warp& w, const Instruction& it, u32 lanes) {
  const u32 *const a = w.source(it.rows[0]), *const b = w.source(it.rows[1]);
  u32 bits = 0;
  for (int i = 0; i < kLanes; ++i) {
    const auto x = widen(get<T>(a, i)), y = widen(get<T>(b, i));
    const int relation = (x < y) * less | (x == y) * equal | (x > y) * greater;
    bits |= static_cast<u32>((it.kind & (relation ? relation : unordered)) != 0) << i;
  }
  w.set_predicate(it.predicates[0], lanes, bits);
}

bool decode_comparison(Decoder& d) {
  static const std::map<std::string, int> names = {{"lt", less},
                                                   {"lo", less},
                                                   {"le", less | equal},
                                                   {"ls", less | equal},
                                                   {"gt", greater},
                                                   {"hi", greater},
                                                   {"ge", greater | equal},
                                                   {"hs", greater | equal},
                                                   {"eq", equal},
                                                   {"ne", less | greater},
                                                   {"num", less | equal | greater},
                                                   {"nan", unordered}};
  std::string name = d.words.at(1);
  if (name.size() == 3 && name[2] == 'u') {  // or unordered
    d.to.kind = unordered;
    name.pop_back();
  }
  const auto found = names.find(name);
  if (found == names.end()) d.unknown("a comparison");
  d.to.kind |= found->second;
  if (d.operands.size() != 3) d.unknown("a combination");
  d.set_predicate(0, 0);
  const std::string type = d.type();
  d.to.rows[0] = d.source(1, bits_of(type));
  d.to.rows[1] = d.source(2, bits_of(type));
  const auto pick = [&]<class T>() { d.to.run = compare<T>; };
  return (with_type(Integers(), type, pick) ||
          with_type(Types<float, double, f16, bf16>(), type, pick)) &&
         set_modifiers(d);
}

}  // namespace

bool decode_logic(Decoder& d) {
  const std::string& name = d.name();
  const std::string type = d.type();
  using Words = Types<u32, u64>;
  if (name == "and") return decode_bitwise(d, [](auto a, auto b) { return a & b; });
  if (name == "or") return decode_bitwise(d, [](auto a, auto b) { return a | b; });
  if (name == "xor") return decode_bitwise(d, [](auto a, auto b) { return a ^ b; });
  if (name == "not") return same_type<1>(d, Integers(), [](auto a) { return ~a; });
  if (name == "popc")
    return with_type(Words(), type, [&]<class T>() {
      d.lanes<u32, T>([](T a) { return static_cast<u32>(std::popcount(a)); });
    });
  if (name == "clz")
    return with_type(Words(), type, [&]<class T>() {
      d.lanes<u32, T>([](T a) { return static_cast<u32>(std::countl_zero(a)); });
    });
  if (name == "brev")
    return same_type<1>(d, Words(), [](auto a) {
      decltype(a) result = 0;
      for (size_t i = 0; i < 8 * sizeof a; ++i) result = result << 1 | (a >> i & 1);
      return result;
    });
  if (name == "bfind" && d.has("shiftamt"))
    return with_type(Words(), type, [&]<class T>() {
      d.lanes<u32, T>([](T a) { return a ? static_cast<u32>(std::countl_zero(a)) : kAllLanes; });
    });
  if (name == "bfi")
    return with_type(Words(), type, [&]<class T>() { d.lanes<T, T, T, u32, u32>(Insert()); });
  if (name == "prmt") {
    if (d.words.size() != 2) d.unknown("a mode");
    return d.lanes<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) { return permuted(a, b, c); });
  }
  return decode_shift(d);
}

bool decode_moves(Decoder& d) {
  if ((d.name() == "mov" || d.name() == "not") && d.type() == "pred")
    return decode_predicate_move(d);
  if (d.name() == "mov") return decode_move(d);
  if (d.name() == "setp") return decode_comparison(d);
  if (d.name() != "selp") return false;
  const int bits = bits_of(d.type());
  d.to.rows[0] = d.destination(0, bits);
  d.to.rows[1] = d.source(1, bits);
  d.to.rows[2] = d.source(2, bits);
  d.set_source_predicate(0, 3);
  return d.runs(bits == 64 ? select<u64> : bits == 32 ? select<u32> : select<u16>);
}

}  // namespace cudasim
