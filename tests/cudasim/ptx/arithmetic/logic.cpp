// Shift, count and combine bits.
#include <algorithm>
#include <bit>

#include "arithmetic/lanes.h"

namespace cudasim {
namespace {

enum Logic { conjunction, disjunction, difference, negation };

void predicate_logic(Warp& w, const Instruction& it, u32 lanes) {
  const u32 a = w.source_predicate(it, 1), b = it.kind == negation ? 0 : w.source_predicate(it, 2);
  w.set_predicate(it.predicates[0], lanes,
                  it.kind == conjunction   ? a & b
                  : it.kind == disjunction ? a | b
                  : it.kind == difference  ? a ^ b
                                           : ~a);
}

void lop3(Warp& w, const Instruction& it, u32 lanes) {
  u32* const to = w.destination(it.rows[0]);
  const u32* const from[] = {w.source(it.rows[1]), w.source(it.rows[2]), w.source(it.rows[3])};
  each_lane(lanes, [&](int lane) {
    const u32 a = from[0][lane], b = from[1][lane], c = from[2][lane];
    u32 result = 0;
    for (u32 i = 0; i < 8; ++i)
      if (it.kind >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    to[lane] = result;
  });
}

// Bits beyond the width are zeros, or the sign's of a signed field.
struct Extract {
  template <class T>
  T operator()(T a, u32 position, u32 length) const {
    constexpr u32 kBits = 8 * sizeof(T);
    position &= 255, length &= 255;
    if (length == 0) return 0;
    const bool sign = std::is_signed_v<T> && (a >> std::min(position + length - 1, kBits - 1) & 1);
    T result = sign ? static_cast<T>(-1) : T{0};
    if (position < kBits) {
      const u32 taken = std::min(length, kBits - position);
      const u64 mask = taken == 64 ? ~u64{0} : (u64{1} << taken) - 1;
      const u64 field = static_cast<u64>(a) >> position & mask;
      result = static_cast<T>(sign ? ~mask | field : field);
    }
    return result;
  }
};

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

void funnel_shift(Warp& w, const Instruction& it, u32 lanes) {
  each_lane(lanes, [&](int lane) {
    const u32 a = w.source(it.rows[1])[lane], b = w.source(it.rows[2])[lane];
    const u32 wanted = w.source(it.rows[3])[lane];
    const u32 n = it.flags ? std::min(wanted, 32u) : wanted & 31;
    const u64 pair = static_cast<u64>(b) << 32 | a;
    w.destination(it.rows[0])[lane] =
        static_cast<u32>(it.kind ? (n == 32 ? a : pair << n >> 32) : pair >> n);
  });
}

bool decode_shift(Decoder& d) {
  const std::string type = d.type();
  if (d.name() == "shl")
    return with_type(Integers(), type, [&]<class T>() {
      d.lanes<T, T, u32>(
          [](T a, u32 n) { return n >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << n); });
    });
  if (d.name() == "shr")
    return with_type(Integers(), type, [&]<class T>() {
      d.lanes<T, T, u32>([](T a, u32 n) {
        if (n >= 8 * sizeof(T)) return a < T{0} ? static_cast<T>(-1) : T{0};
        return static_cast<T>(a >> n);
      });
    });
  if (d.name() != "shf") return false;
  // The pair is {b, a}. A clamped shift by 32 or more takes the other word whole.
  d.to.kind = d.has("l");
  d.to.flags = d.has("clamp");
  for (size_t i = 0; i < 4; ++i)
    d.to.rows[i] = i ? d.source(d.operands.at(i), 32) : d.destination(d.operands.at(i), 32);
  d.to.run = funnel_shift;
  return true;
}

}  // namespace

bool decode_logic(Decoder& d) {
  const std::string& name = d.name();
  const std::string type = d.type();
  if (type == "pred" && (name == "and" || name == "or" || name == "xor" || name == "not")) {
    d.set_predicate(0, d.operands.at(0));
    d.set_source_predicate(1, d.operands.at(1));
    if (name != "not") d.set_source_predicate(2, d.operands.at(2));
    d.to.kind = name == "and"   ? conjunction
                : name == "or"  ? disjunction
                : name == "xor" ? difference
                                : negation;
    d.to.run = predicate_logic;
    return true;
  }
  if (name == "and") return same_type<2>(d, Integers(), [](auto a, auto b) { return a & b; });
  if (name == "or") return same_type<2>(d, Integers(), [](auto a, auto b) { return a | b; });
  if (name == "xor") return same_type<2>(d, Integers(), [](auto a, auto b) { return a ^ b; });
  if (name == "not") return same_type<1>(d, Integers(), [](auto a) { return ~a; });
  if (name == "popc")
    return with_type(Types<u32, u64>(), type, [&]<class T>() {
      d.lanes<u32, T>([](T a) { return static_cast<u32>(std::popcount(a)); });
    });
  if (name == "clz")
    return with_type(Types<u32, u64>(), type, [&]<class T>() {
      d.lanes<u32, T>([](T a) { return static_cast<u32>(std::countl_zero(a)); });
    });
  if (name == "brev")
    return with_type(Types<u32, u64>(), type, [&]<class T>() {
      d.lanes<T, T>([](T a) {
        T result = 0;
        for (size_t i = 0; i < 8 * sizeof(T); ++i)
          result |= (a >> i & 1) << (8 * sizeof(T) - 1 - i);
        return result;
      });
    });
  if (name == "bfind") {
    const bool shifts = d.has("shiftamt");
    return with_type(Types<u32, s32, u64, s64>(), type, [&]<class T>() {
      using U = std::make_unsigned_t<T>;
      constexpr auto zeros = [](T a) {
        return static_cast<u32>(std::countl_zero(static_cast<U>(a < T{0} ? ~a : a)));
      };
      constexpr u32 kBits = 8 * sizeof(T);
      shifts ? d.lanes<u32, T>([](T a) {
        const u32 n = decltype(zeros){}(a);
        return n == kBits ? kAllLanes : n;
      })
             : d.lanes<u32, T>([](T a) { return kBits - 1 - decltype(zeros){}(a); });
    });
  }
  if (name == "bfe")
    return with_type(Types<u32, s32, u64, s64>(), type,
                     [&]<class T>() { d.lanes<T, T, u32, u32>(Extract()); });
  if (name == "bfi")
    return with_type(Types<u32, u64>(), type,
                     [&]<class T>() { d.lanes<T, T, T, u32, u32>(Insert()); });
  if (name == "prmt") {
    if (d.words.size() != 2) d.unknown("a mode");
    return d.lanes<u32, u32, u32, u32>([](u32 a, u32 b, u32 c) { return permuted(a, b, c); });
  }
  if (name == "lop3") {
    if (d.operands.size() != 5 || d.operands[4].type != Operand::integer) d.unknown();
    d.to.kind = static_cast<s32>(d.operands[4].value);
    d.to.rows[0] = d.destination(d.operands[0], 32);
    for (size_t i = 1; i < 4; ++i) d.to.rows[i] = d.source(d.operands[i], 32);
    d.to.run = lop3;
    return true;
  }
  return decode_shift(d);
}

}  // namespace cudasim
