// Read, modify and write memory at once.
#include <algorithm>

#include "memory/memory.h"
#include "order/order.h"
#include "parser/words.h"

namespace cudasim {
namespace {

enum Operation { exch, cas, add, inc, dec, min, max, conjunction, disjunction, difference };

template <class T>
T combined(int operation, T old, T b, T c) {
  if constexpr (is_pair<T>) {
    using Half = decltype(old.low);
    return {combined<Half>(operation, old.low, b.low, c.low),
            combined<Half>(operation, old.high, b.high, c.high)};
  } else if constexpr (is_half<T>) {
    T sum;
    narrow(static_cast<double>(widen(old)) + widen(b), sum);
    return sum;
  } else {
    switch (operation) {
      case exch: return b;
      case cas: return memcmp(&old, &b, sizeof(T)) == 0 ? c : old;
      case add: return static_cast<T>(old + b);
      case inc: return old >= b ? T{0} : static_cast<T>(old + 1);
      case dec: return old == 0 || old > b ? b : static_cast<T>(old - 1);
      case min: return b < old ? b : old;
      case max: return b > old ? b : old;
    }
    if constexpr (std::is_integral_v<T>) {
      if (operation == conjunction) return old & b;
      if (operation == disjunction) return old | b;
      if (operation == difference) return old ^ b;
    }
    return old;
  }
}

// rows[0]: the address, rows[1]: the old value if it.count, rows[2], rows[3]: operands.
template <class T>
void atomic(Warp& w, const Instruction& it, u32 lanes) {
  Accesses accesses(w, it, role_of(w, true, true, it.flags & wide));
  const auto one = [&](int lane) {
    u64 address = address_of(w, it, it.rows[0], lane);
    const bool in_shared = it.mode || (address & kTags) == kSharedTag;
    u8* data;
    if (in_shared) {
      const u32 at = static_cast<u32>(address);
      data = shared_bytes(*w.block, at, sizeof(T), sizeof(T), "atomic", lane);
      check_written(*w.block, at, sizeof(T), "atomic", lane);
      note_generic_write(w, lane, at, sizeof(T));
      accesses.shared(at, sizeof(T), lane);
    } else {
      data = global_bytes(w, lane, address, sizeof(T), sizeof(T), "atomic");
      check_fresh(data, sizeof(T), "atomic", lane);
      accesses.global(address, sizeof(T), lane);
    }
    acquire(w, lane, data, it.flags);
    release(w, data, it.flags);
    T old;
    memcpy(&old, data, sizeof old);
    const T b = get<T>(w.source(it.rows[2]), lane);
    const T c = it.kind == cas ? get<T>(w.source(it.rows[3]), lane) : T{};
    const T value = combined(it.kind, old, b, c);
    memcpy(data, &value, sizeof value);
    if (it.count) put<T>(w.destination(it.rows[1]), lane, old);
  };
  // The order of lanes is free.
  if (w.grid->order == Order::reverse) {
    for (int lane = kLanes; lane-- > 0;)
      if (lanes >> lane & 1) one(lane);
  } else {
    each_lane(lanes, one);
  }
  accesses.finish();
  w.tick(lanes);
  ++w.grid->progress;
}

}  // namespace

bool decode_fence(Decoder& d);  // order.cpp

bool decode_atomic(Decoder& d) {
  if (d.name() != "atom" && d.name() != "red") return decode_fence(d);
  static const std::pair<const char*, Operation> names[] = {
      {"exch", exch}, {"cas", cas}, {"add", add},         {"inc", inc},        {"dec", dec},
      {"min", min},   {"max", max}, {"and", conjunction}, {"or", disjunction}, {"xor", difference}};
  d.to.kind = -1;
  for (const auto& [name, operation] : names)
    if (d.has(name)) d.to.kind = operation;
  const std::string type = d.type();
  const int bits = bits_of(type);
  const bool is_float_add = type[0] == 'f' || type[0] == 'b';
  if (d.to.kind < 0 || bits < 16 || bits > 64 || d.has("v2") || d.has("v4")) d.unknown();
  if (is_float_add && bits_of(type) && type.find("16") != std::string::npos && type != "b16" &&
      d.to.kind != add)
    d.unknown();
  d.to.flags = order_of(d, true);
  d.to.mode = space_of(d) == Space::shared;
  d.to.count = d.name() == "atom";
  size_t at = 0;
  if (d.to.count) d.to.rows[1] = d.destination(d.operands.at(at++), bits);
  d.to.rows[0] = d.base(d.operands.at(at++), d.to.mode ? 32 : 64);
  d.to.rows[2] = d.source(d.operands.at(at++), bits);
  if (d.to.kind == cas) d.to.rows[3] = d.source(d.operands.at(at++), bits);
  if (at != d.operands.size()) d.unknown("another number of operands");
  const auto pick = [&]<class T>() { d.to.run = atomic<T>; };
  return with_type(Types<u32, s32, u64, s64, float, double, u16>(), type, pick) ||
         with_type(Halves(), type, pick);
}

}  // namespace cudasim
