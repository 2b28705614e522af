// Read, modify and write memory at once.
#include "memory/memory.h"
#include "parser/words.h"

namespace cudasim {
namespace {

enum Operation { exch, cas, add, inc, dec, min, max };

template <class T>
T combined(int operation, T old, T b, T c) {
  switch (operation) {
    case exch: return b;
    case cas: return memcmp(&old, &b, sizeof(T)) == 0 ? c : old;
    case add: return static_cast<T>(old + b);
    case inc: return old >= b ? T{0} : static_cast<T>(old + 1);
    case dec: return old == 0 || old > b ? b : static_cast<T>(old - 1);
    case min: return b < old ? b : old;
    default: return b > old ? b : old;
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
      data = shared_bytes(*w.block, at, sizeof(T), sizeof(T), lane);
      check_written(*w.block, at, sizeof(T), lane);
      note_generic_write(w, lane, at, sizeof(T));
      accesses.shared(at, sizeof(T), lane);
    } else {
      data = global_bytes(w, lane, address, sizeof(T), sizeof(T));
      check_fresh(data, sizeof(T), lane);
      accesses.global(address, sizeof(T), lane);
    }
    acquire(w, data, it.flags);
    release(w, data, it.flags);
    T old;
    memcpy(&old, data, sizeof old);
    const T b = get<T>(w.source(it.rows[2]), lane);
    const T c = it.kind == cas ? get<T>(w.source(it.rows[3]), lane) : T{};
    const T value = combined(it.kind, old, b, c);
    memcpy(data, &value, sizeof value);
    if (it.count) put<T>(w.destination(it.rows[1]), lane, old);
  };
  const bool backwards = w.grid->order == Order::reverse;  // the order of lanes is free
  for (int i = 0; i < kLanes; ++i)
    if (const int lane = backwards ? kLanes - 1 - i : i; lanes >> lane & 1) one(lane);
  accesses.finish();
  w.tick(lanes);
  ++w.grid->progress;
}

}  // namespace

bool decode_atomic(Decoder& d) {
  if (d.name() != "atom" && d.name() != "red") return false;
  static const char* const names[] = {"exch", "cas", "add", "inc", "dec", "min", "max"};
  d.to.kind = -1;
  for (int i = exch; i <= max; ++i)
    if (d.has(names[i])) d.to.kind = i;
  const std::string type = d.type();
  const int bits = bits_of(type);
  if (d.to.kind < 0 || d.has("v2") || d.has("v4")) d.unknown();
  d.to.flags = order_of(d, true);
  d.to.mode = space_of(d) == Space::shared;
  d.to.count = d.name() == "atom";
  size_t at = 0;
  if (d.to.count) d.to.rows[1] = d.destination(at++, bits);
  d.to.rows[0] = d.base(at++, d.to.mode ? 32 : 64);
  d.to.rows[2] = d.source(at++, bits);
  if (d.to.kind == cas) d.to.rows[3] = d.source(at++, bits);
  if (at != d.operands.size()) d.unknown("another number of operands");
  return with_type(Types<u32, s32, u64, s64, float, double>(), type,
                   [&]<class T>() { d.to.run = atomic<T>; });
}

}  // namespace cudasim
